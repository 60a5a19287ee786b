# SPDX-License-Identifier: MIT
"""Models of transformers decode by one launch: `torchrun --nproc-per-node N tests/gpu/decode_check.py [names]`.

Small models that have learned random texts go on from their first tokens, by `ops.DecodeStep` in a CUDA graph and by
the model itself: both generate the same 256 tokens. Some have float8 weights, or a paged cache with pages in a random
order. Prints PASS or FAIL for each model and rank; a model that has not learned its texts fails before it generates.
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
from tests.persistent.float8_linear import to_float8  # noqa: E402
from tilescale import ops  # noqa: E402

LIMIT_S = 200.0
PROMPT, TOKENS, KEYS = 16, 256, 320
VOCABULARY, STEPS, OFTEN, RATE = 256, 2000, 50, 1e-3
"""Of the models; of training: steps at most, those between two tests of what is learned, and their rate."""

MARGIN, ROUNDED = 6.0, 2.0
"""Least distance of a right token's logit to the next one: as learned, and of the rounded model, which is far more than
logits change with the order of sums."""

KINDS = {"llama": ("LlamaConfig", "LlamaForCausalLM"), "qwen3": ("Qwen3Config", "Qwen3ForCausalLM")}
KINDS["qwen3_moe"] = "Qwen3MoeConfig", "Qwen3MoeForCausalLM"
EXPERTS = {"num_local_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "norm_topk_prob": True}


@dataclass(frozen=True)
class Check:
    """A model, the number of its texts, whether its weights are float8, and the keys of a page."""

    kind: str
    batch: int
    is_float8: bool = False
    page_size: int | None = None

    def run(self) -> None:
        """Learn, decode, compare."""
        generator = torch.Generator("cuda").manual_seed(self.batch)
        shape = self.batch, PROMPT + TOKENS
        texts = ops.broadcast(torch.randint(0, VOCABULARY, shape, generator=generator, device="cuda"))
        model = self.model(texts)
        margin = self.margin(model, texts)
        if margin < ROUNDED:
            raise AssertionError(f"the model has not learned its texts: the margin of a token is {margin:.2f}")
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
        sizes |= {"head_dim": 128, "num_hidden_layers": 4, "vocab_size": VOCABULARY}
        sizes |= EXPERTS if self.kind == "qwen3_moe" else {}
        made = kind(config(**sizes, eos_token_id=None)).cuda()  # else `generate` forbids that token
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
        return to_float8(made) if self.is_float8 else made

    @torch.no_grad()
    def margin(self, model: Any, texts: torch.Tensor) -> float:
        """Least distance of the logit of the right token to the largest other one."""
        logits, right = model(texts).logits[:, PROMPT - 1 : -1].float(), texts[:, PROMPT:, None]
        return float((logits.gather(-1, right)[..., 0] - logits.scatter(-1, right, -torch.inf).amax(-1)).min())

    @torch.no_grad()
    def decoded(self, model: Any, prompt: torch.Tensor) -> torch.Tensor:
        """Tokens that the model generates, by one launch for each, from the third one on replayed from a graph."""
        step = ops.DecodeStep(model, self.batch, KEYS, page_size=self.page_size, schedule="persistent")
        if self.page_size is not None:
            pages = torch.randperm(step.block_table.numel(), device="cuda", dtype=torch.int32)
            step.block_table.copy_(pages.view_as(step.block_table))
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
    for kind, batch in ("llama", 1), ("llama", 16), ("qwen3", 5), ("qwen3_moe", 3):
        yield f"{kind}_{batch}", Check(kind, batch).run
    yield "llama_1_float8", Check("llama", 1, is_float8=True).run
    yield "qwen3_5_float8", Check("qwen3", 5, is_float8=True).run
    yield "llama_5_pages", Check("llama", 5, page_size=16).run
    yield "qwen3_1_float8_pages", Check("qwen3", 1, is_float8=True, page_size=64).run


if __name__ == "__main__":
    tilescale.init()
    named_checks.run(checks(), LIMIT_S)
