/** Yields [kind, begin, end] of keywords, builtins, strings, numbers and comments in Python code. */

const words =
  "False None True and as assert async await break class continue def del elif else except finally for from global if " +
  "import in is lambda nonlocal not or pass raise return try while with yield match case";
const builtins =
  "abs all any bool dict divmod enumerate filter float int isinstance len list map max min print range reversed round " +
  "set sorted str sum tuple zip input pow open";
const keyword = new Set(words.split(" "));
const builtin = new Set(builtins.split(" "));
const lexeme =
  /(#[^\n]*)|((?:[rbfuRBFU]{0,2})(?:"""(?:[^\\]|\\[\s\S])*?(?:"""|$)|'''(?:[^\\]|\\[\s\S])*?(?:'''|$)|"(?:[^"\\\n]|\\[\s\S])*(?:"|$|(?=\n))|'(?:[^'\\\n]|\\[\s\S])*(?:'|$|(?=\n))))|(\b(?:0[xob][\da-f_]+|\d[\d_]*\.?\d*(?:e[+-]?\d+)?j?)\b)|([\p{L}_][\p{L}\p{N}_]*)/giu;

const codeLimit = 100_000;

export function* pythonSpans(text) {
  for (const found of text.slice(0, codeLimit).matchAll(lexeme)) {
    const kind = found[1] ? "com" : found[2] ? "str" : found[3] ? "num" : keyword.has(found[4]) ? "kw" : builtin.has(found[4]) ? "bi" : null;
    if (kind) yield [kind, found.index, found.index + found[0].length];
  }
}
