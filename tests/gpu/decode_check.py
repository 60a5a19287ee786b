# SPDX-License-Identifier: MIT
"""Models of transformers decode by one launch: `torchrun --nproc-per-node N tests/gpu/decode_check.py [names]`.

Small models that have learned random texts go on from their first tokens, by `ops.DecodeStep` in a CUDA graph and by
the model itself: both generate the same 256 tokens. Prints PASS or FAIL for each model and rank.
"""

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import tilescale  # noqa: E402
from tests.gpu import named_checks  # noqa: E402
from tilescale import ops  # noqa: E402

LIMIT_S = 200.0
PROMPT, TOKENS, KEYS = 16, 256, 320
VOCABULARY, STEPS, OFTEN, RATE = 256, 2000, 50, 1e-3
"""Of the models; of training: steps at most, those between two tests of what is learned, and their rate."""

MARGIN = 3.0
"""Least distance of a right token's logit to the next one: far more than bfloat16 rounds."""

KINDS = {"llama": ("LlamaConfig", "LlamaForCausalLM"), "qwen3": ("Qwen3Config", "Qwen3ForCausalLM")}


@dataclass(frozen=True)
class Check:
    """A model, and the number of its texts."""

    kind: str
    batch: int

    def run(self) -> None:
        """Learn, decode, compare."""
        generator = torch.Generator("cuda").manual_seed(self.batch)
        shape = self.batch, PROMPT + TOKENS
        texts = ops.broadcast(torch.randint(0, VOCABULARY, shape, generator=generator, device="cuda"))
        model = self.model(texts)
        found = self.decoded(model, texts[:, :PROMPT])
        want = model.generate(
            texts[:, :PROMPT], max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False,
            attention_mask=torch.ones_like(texts[:, :PROMPT]), pad_token_id=0,
        )[:, PROMPT:]  # fmt: skip
        for who, made in ("the model", want), ("one launch", found):
            wrong = (made != texts[:, PROMPT:]).nonzero()
            if len(wrong):
                raise AssertionError(f"{who}: {len(wrong)} of {made.numel()} tokens differ, first {wrong[0].tolist()}")

    def model(self, texts: torch.Tensor) -> Any:
        """A small model that continues these texts, with the same parameters on all ranks."""
        import transformers

        config, kind = (getattr(transformers, name) for name in KINDS[self.kind])
        torch.manual_seed(0)
        sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4}
        made = kind(config(**sizes, head_dim=128, num_hidden_layers=4, vocab_size=VOCABULARY)).cuda()
        optimizer = torch.optim.AdamW(made.parameters(), RATE, weight_decay=0.0)
        for number in range(STEPS):
            loss = made(texts, labels=texts).loss
            if number % OFTEN == 0 and self.margin(made, texts) > MARGIN:
                break
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        made = made.bfloat16().eval()
        for parameter in made.parameters():
            parameter.data = ops.broadcast(parameter.data)
        return made

    @torch.no_grad()
    def margin(self, model: Any, texts: torch.Tensor) -> float:
        """Least distance of the logit of the right token to the largest other one."""
        logits, right = model(texts).logits[:, PROMPT - 1 : -1], texts[:, PROMPT:, None]
        return float((logits.gather(-1, right)[..., 0] - logits.scatter(-1, right, -torch.inf).amax(-1)).min())

    @torch.no_grad()
    def decoded(self, model: Any, prompt: torch.Tensor) -> torch.Tensor:
        """Tokens that the model generates, by one launch for each, from the third one on replayed from a graph."""
        step = ops.DecodeStep(model, self.batch, KEYS, schedule="persistent")
        made = model(prompt, use_cache=True)
        step.load(made.past_key_values)
        token = made.logits[:, -1].argmax(-1)
        found, graph = [token.clone()], torch.cuda.CUDAGraph()
        for number in range(1, TOKENS):
            if number < 3:
                token.copy_(step(token).argmax(-1))
            elif number == 3:
                with torch.cuda.graph(graph):
                    token.copy_(step(token).argmax(-1))
            if number >= 3:
                graph.replay()
            found.append(token.clone())
        step.kernel.synchronize()
        return torch.stack(found, 1)


def checks() -> Iterator[tuple[str, Any]]:
    """A check for each model and batch; none without transformers."""
    if importlib.util.find_spec("transformers") is None:
        print("SKIP: no transformers here", flush=True)
        return
    for kind, batch in ("llama", 1), ("llama", 16), ("qwen3", 5):
        yield f"{kind}_{batch}", Check(kind, batch).run


if __name__ == "__main__":
    tilescale.init()
    named_checks.run(checks(), LIMIT_S)
