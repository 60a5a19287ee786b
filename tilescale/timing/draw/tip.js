// What a person reads at a span: what it is, when, how much, how fast.
const { left, right, nbytes, flops } = spans.data
const at = special_vars.index
const [what, ...more] = tips[value].split("\n")
const digits = (number) => Number(number.toPrecision(4)).toString()
const scaled = (number, unit) => {
  for (const [size, prefix] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (number >= size) return `${digits(number / size)} ${prefix}${unit}`
  }
  return `${digits(number)} ${unit}`
}
const us = right[at] - left[at]
const lines = [what, `${digits(us)} us, from ${digits(left[at])} to ${digits(right[at])}`]
for (const [amount, unit] of [[nbytes[at], "B"], [flops[at], "op"]]) {
  if (amount > 0) lines.push(scaled(amount, unit) + (us > 0 ? `, ${scaled((amount / us) * 1e6, `${unit}/s`)}` : ""))
}
return [...lines, ...more].join("\n")
