// Arranges the rows of an interactive timeline and takes its reader's colours: when the page is there, and when a unit
// is tapped, which unfolds it or folds it again.
const { first, open, tracks } = units.data
const hidden = NaN
const UNIT = 2 // rows that a unit's shares take

if (cb_obj.event_name === "tap") {
  const tapped = Array.from(first).findIndex((row) => row <= cb_obj.y && cb_obj.y < row + UNIT)
  if (tapped < 0) return
  open[tapped] = 1 - open[tapped]
} else {
  const dark = window.matchMedia("(prefers-color-scheme: dark)")
  const dress = () => {
    const [ink, grid] = dark.matches ? ["#d5d9e0", "#3a3f47"] : ["#1f2a37", "#dddddd"]
    const axis = main.below[0]
    axis.major_label_text_color = axis.axis_label_text_color = axis.axis_line_color = ink
    axis.major_tick_line_color = axis.minor_tick_line_color = ink
    main.center[0].grid_line_color = grid
    head.select("names")[0].glyph.text_color = { value: ink }
    main.select("path")[0].glyph.line_color = { value: ink }
  }
  dark.addEventListener("change", dress)
  dress()
}

let rows = 0
for (let unit = 0; unit < first.length; unit++) {
  first[unit] = rows
  rows += UNIT + (open[unit] ? tracks[unit] : 0)
}

const place = (source, y) => {
  const data = source.data, count = data.unit.length
  const columns = { ...data }
  for (const [name, at] of Object.entries(y)) {
    columns[name] = Float32Array.from({ length: count }, (_, i) => at(data.unit[i], i, data))
  }
  source.data = columns
}
const row = (unit, track) => first[unit] + UNIT + track

place(spans, {
  top: (unit, i, data) => (open[unit] ? row(unit, data.track[i]) + 0.1 : hidden),
  bottom: (unit, i, data) => (open[unit] ? row(unit, data.track[i]) + 0.86 : hidden),
})
place(shares, {
  bottom: (unit, i, data) => first[unit] + UNIT * (0.9 - 0.8 * data.low[i]),
  top: (unit, i, data) => first[unit] + UNIT * (0.9 - 0.8 * data.high[i]),
})
place(path, { y: (unit, i, data) => (open[unit] ? row(unit, data.track[i]) + 0.93 : first[unit] + UNIT * 0.94) })
place(labels, {
  y: (unit, i, data) => (data.track[i] < 0 ? first[unit] + UNIT / 2 : open[unit] ? row(unit, data.track[i]) + 0.5 : hidden),
})
labels.data.text = labels.data.name.map((name, i) =>
  labels.data.track[i] < 0 ? `${open[labels.data.unit[i]] ? "\u25be" : "\u25b8"} ${name}` : `    ${name}`)
labels.change.emit()

const room = Math.max(8, Math.floor((window.innerHeight - 190) / row_height))
const seen = Math.min(rows, room)
const top = Math.max(0, Math.min(main.y_range.end, rows - seen))
main.y_range.setv({ bounds: [0, rows], end: top, start: top + seen })
for (const figure of [head, main]) figure.height = seen * row_height + 90
