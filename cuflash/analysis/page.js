// The script of the page that `cuflash plot memory --html` writes. The model comes from Python:
// bytes of a method of attention are B H T (quadratic T + width D + row), exactly.

const PREFIXES = [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""]];

function withPrefix(value) {
  const [scale, prefix] = PREFIXES.find(([scale]) => value >= scale) ?? [1, ""];
  return `${Number((value / scale).toPrecision(3))} ${prefix}`;
}

function bytes({ quadratic, width, row }, { batch, heads, d }, tokens) {
  return batch * heads * tokens * (quadratic * tokens + width * d + row);
}

// The most tokens that fit: the root of a quadratic, put right where its rounding is off by one.
function largestTokens(coefficients, settings, capacity) {
  const a = coefficients.quadratic;
  const b = coefficients.width * settings.d + coefficients.row;
  const c = capacity / (settings.batch * settings.heads);
  let tokens = Math.floor((2 * c) / (b + Math.sqrt(b * b + 4 * a * c)));
  while (bytes(coefficients, settings, tokens) > capacity) tokens -= 1;
  while (bytes(coefficients, settings, tokens + 1) <= capacity) tokens += 1;
  return tokens;
}

// All that is shown, by method, for settings {batch, heads, d, dtype, quantity, tokens}.
function evaluate(model, settings) {
  const coefficients = model.bytes[settings.dtype];
  const shown = {};
  for (const method of model.methods) {
    const { memory, moved } = coefficients[method];
    const relative = (tokens) =>
      bytes(moved, settings, tokens) / bytes(coefficients.flash.moved, settings, tokens);
    const value =
      settings.quantity === "memory" ? (tokens) => bytes(memory, settings, tokens) : relative;
    shown[method] = {
      curve: model.tokens.map(value),
      here: value(settings.tokens),
      memory: bytes(memory, settings, settings.tokens),
      relative: relative(settings.tokens),
      limit: largestTokens(memory, settings, model.capacity),
    };
  }
  return shown;
}

function describe(model, settings, shown) {
  const count = (number) => number.toLocaleString("en-US");
  const lines = model.methods.map((method) => {
    const { memory, relative, limit } = shown[method];
    const fits = settings.tokens <= limit ? "fits" : "does not fit";
    return (
      `<tr><td>${model.labels[method]}</td><td>${withPrefix(memory)}B, ${fits}</td>` +
      `<td>${Number(relative.toPrecision(3))}</td><td>T = ${count(limit)}</td></tr>`
    );
  });
  return (
    `<p>T = ${count(settings.tokens)} on ${model.gpu}, ${withPrefix(model.capacity)}B</p>` +
    "<table><tr><th>attention</th><th>memory</th><th>traffic, flash = 1</th>" +
    `<th>reaches the GPU's memory at</th></tr>${lines.join("")}</table>`
  );
}

// Read the widgets and bring the picture up to date; called on every change.
function update(model, widgets, view) {
  const settings = {
    batch: widgets.batch.value,
    heads: widgets.heads.value,
    d: widgets.d.value,
    tokens: Math.round(2 ** widgets.power.value),
    dtype: widgets.dtype.labels[widgets.dtype.active],
    quantity: widgets.quantity.active === 0 ? "memory" : "traffic",
  };
  const shown = evaluate(model, settings);
  const inMemory = settings.quantity === "memory";
  const pick = (name) => model.methods.map((method) => shown[method][name]);

  view.curves.data = {
    tokens: model.tokens,
    ...Object.fromEntries(model.methods.map((method) => [method, shown[method].curve])),
  };
  view.here.data = {
    tokens: model.methods.map(() => settings.tokens),
    value: pick("here"),
    color: model.colors,
  };
  // A crossing beyond the axis would stretch it; the table names it all the same.
  const [first, last] = [model.tokens[0], model.tokens[model.tokens.length - 1]];
  const onAxis = (method) => first <= shown[method].limit && shown[method].limit <= last;
  const crossed = model.methods.filter((method) => inMemory && onAxis(method));
  view.crossings.data = {
    tokens: crossed.map((method) => shown[method].limit),
    value: crossed.map(() => model.capacity),
    text: crossed.map((method) => `T = ${shown[method].limit.toLocaleString("en-US")}`),
    color: crossed.map((method) => model.colors[model.methods.indexOf(method)]),
    // Two crossings are near each other: the first is named to its left, the next to its right.
    align: crossed.map((_, i) => (i === 1 ? "left" : "right")),
    x: crossed.map((_, i) => (i === 1 ? 8 : -8)),
    y: crossed.map((_, i) => (i === 1 ? 22 : -6)),
  };
  view.capacity.visible = inMemory;
  view.axis.axis_label = inMemory ? "memory, bytes" : "bytes through HBM, flash = 1";
  view.summary.text = describe(model, settings, shown);
}
