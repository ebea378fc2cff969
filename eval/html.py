"""report.html: one page that needs no other file, no script and no network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from eval.examples import Example
from eval.plots import acceptance_plot, histogram_plot, time_plot
from eval.report import (
    describe_differences,
    describe_identity,
    hardware,
    interval,
    row,
    tau,
    tree_sizes,
    warnings,
)

TAU = (
    "τ (the acceptance length) is the number of tokens that one forward pass of the target yields on average: the "
    "draft tokens that it accepts plus one token of its own, so plain decoding has τ = 1."
)
ACCEPTANCE = ("Acceptance by position", "of a draft token, when all before it were accepted")
LONGEST_PROMPT = 600  # characters of a prompt that the page shows

CSS = """
:root { --ink: #1d2433; --soft: #5d6778; --line: #e4e7ec; --accepted: #d6e6ff; --edge: #6b9cec; }
* { box-sizing: border-box; }
body { margin: 0; background: #f7f8fa; color: var(--ink); font: 16px/1.55 system-ui, "Segoe UI", Roboto,
  "Liberation Sans", sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .3rem; }
h2 { font-size: 1.15rem; margin: 2.6rem 0 .7rem; }
p { margin: .4rem 0; max-width: 46rem; }
.soft, figcaption, th { color: var(--soft); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(320px, 1fr)); gap: 1rem; margin: 1.6rem 0 1rem; }
.card, figure, .scroll, .example { background: #fff; border: 1px solid var(--line); border-radius: 10px; }
.card { padding: 1.1rem 1.4rem; }
.card h3 { margin: 0 0 .5rem; font-size: 1rem; }
.big { display: flex; flex-wrap: wrap; gap: .8rem 2rem; }
.big b { display: block; font-size: 2rem; line-height: 1.15; }
.big span { white-space: nowrap; }
.card p { margin-top: .8rem; max-width: none; }
.big span, .card p { color: var(--soft); font-size: .85rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .5rem .9rem; text-align: right; white-space: nowrap; border-top: 1px solid var(--line); }
tr:first-child > * { border-top: 0; }
th { font-weight: 600; }
th:first-child, td:first-child, .facts td, .facts th { text-align: left; }
.words { margin: 1.2rem 0; }
.words :is(td, th) { padding: .5rem .55rem; }
.words :is(td, th):is(:nth-child(2), :last-child) { text-align: left; }
.words td:is(:nth-child(2), :last-child) { white-space: normal; overflow-wrap: anywhere; min-width: 7rem; }
.facts td, .facts th { padding: .25rem .9rem; }
.facts td { white-space: normal; width: 100%; overflow-wrap: anywhere; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(310px, 1fr)); gap: 1rem; align-items: start; }
figure { margin: 0; padding: 1rem; }
figure svg { width: 100%; height: auto; display: block; }
figcaption { font-size: .85rem; margin-bottom: .5rem; }
figcaption b { display: block; color: var(--ink); font-size: .95rem; }
.example { padding: 1rem 1.25rem; margin: 1rem 0; }
.example .prompt { white-space: pre-wrap; overflow-wrap: anywhere; max-width: none; color: var(--soft);
  border-left: 3px solid var(--line); padding-left: .8rem; font-size: .9rem; }
.wide { max-width: none; }
.answer { white-space: pre-wrap; overflow-wrap: anywhere; max-width: none; line-height: 1.75; }
mark { background: var(--accepted); color: inherit; border-bottom: 2px solid var(--edge); border-radius: 3px; }
"""


def page(report: dict[str, Any], examples: Sequence[Example], baseline_s: dict[str, float]) -> str:
    """The whole page as text.

    report: what report.json holds; baseline_s: seconds of one plain decoding step, per benchmark.
    """
    title = f"{report['draft']} drafting for {report['target']}"
    cards = (_card(name, numbers, baseline_s[name]) for name, numbers in report["benchmarks"].items())
    body = "\n".join(
        [
            f"<h1>{escape(title)}</h1>",
            f'<p class="soft wide">{escape(_subtitle(report))}</p>',
            *(f"<p><strong>{escape(warning)}.</strong></p>" for warning in warnings(report)),
            f'<div class="cards">{"".join(cards)}</div>',
            f"<p>{escape(TAU)}</p>",
            "<h2>Numbers</h2>",
            _numbers(report["benchmarks"]),
            _differences(report["benchmarks"], report["environment"]["dtype"]),
            "<h2>Where the speed comes from</h2>",
            _plots(report["benchmarks"], baseline_s),
            _examples(examples),
            "<h2>How it was measured</h2>",
            _method(report),
        ]
    )
    return document(title, body)


def document(title: str, body: str) -> str:
    """A whole page: title is text, body is HTML."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{CSS}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _subtitle(report: dict[str, Any]) -> str:
    env = report["environment"]
    sampling = "greedy" if report["temperature"] == 0 else f"temperature {report['temperature']:g}"
    tree = f"{report['tree']['kind']} tree ({tree_sizes(report['tree'])})"
    return " · ".join((sampling, tree, env["dtype"], hardware(env), env["date"][:10]))


def _card(name: str, numbers: dict[str, Any], plain_s: float) -> str:
    return (
        f'<section class="card"><h3>{escape(name)}</h3><div class="big">'
        f"<div><b>{tau(numbers)}</b><span>τ, tokens per pass</span></div>"
        f"<div><b>{numbers['speedup']:.2f}×</b><span>speedup {interval(numbers['speedup_ci'])}</span></div>"
        f"<div><b>{numbers['tokens_per_s']:.1f}</b>"
        f"<span>tokens/s, {numbers['baseline_tokens_per_s']:.1f} without</span></div></div>"
        f"<p>{escape(_balance(numbers, plain_s))} {escape(_identity(numbers))}</p></section>"
    )


def _balance(numbers: dict[str, Any], plain_s: float) -> str:
    if numbers["tau"] is None:
        return "Every answer ended with its first token, so nothing was drafted."
    cost = (numbers["draft_s_per_round"] + numbers["verify_s_per_round"]) / plain_s
    return (
        f"A round of drafting and verifying takes as long as {cost:.2f} plain steps and yields {tau(numbers)} tokens."
    )


def _identity(numbers: dict[str, Any]) -> str:
    if numbers["identical"] is None:
        return "Sampled answers differ from run to run, so they are not compared."
    if numbers["identical"]:
        return "Every output is token-identical to plain decoding."
    return f"{describe_identity(numbers)} outputs are token-identical to plain decoding; the others are listed below."


def _numbers(benchmarks: dict[str, dict[str, Any]]) -> str:
    head = ("benchmark", "new tokens", "prompts", "τ", "speedup", "95% interval", "tokens/s", "plain", "identical")
    return table(head, [(name, str(numbers["new_tokens"]), *row(numbers)) for name, numbers in benchmarks.items()])


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows of text below a head."""
    lines = [f"<tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr>"]
    lines += [f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>" for cells in rows]
    return f'<div class="scroll"><table>{"".join(lines)}</table></div>'


def _differences(benchmarks: dict[str, dict[str, Any]], dtype: str) -> str:
    sentences = [s for name, numbers in benchmarks.items() for s in describe_differences(name, numbers, dtype)]
    if not sentences:
        return ""
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return (
        "<h2>Outputs that differ from plain decoding</h2><p>A pass over many tokens rounds otherwise than a pass over "
        "one, so two almost equally likely tokens can change places: a near-tie.</p>"
        f"<ul>{items}</ul>"
    )


def _plots(benchmarks: dict[str, dict[str, Any]], baseline_s: dict[str, float]) -> str:
    return figures(
        (*ACCEPTANCE, acceptance_plot(benchmarks)),
        ("Accepted tokens per round", "the target adds one more of its own each time", histogram_plot(benchmarks)),
        ("Time per round", "drafting and verifying, beside one plain decoding step", time_plot(benchmarks, baseline_s)),
    )


def figures(*each: tuple[str, str, str]) -> str:
    """Title, caption and SVG of each, side by side where there is room."""
    shown = (f"<figure><figcaption><b>{title}</b>{caption}</figcaption>{svg}</figure>" for title, caption, svg in each)
    return f'<div class="plots">{"".join(shown)}</div>'


def _examples(examples: Sequence[Example]) -> str:
    if not examples:
        return ""
    return (
        "<h2>Answers, token by token</h2><p><mark>Marked</mark> text was drafted and accepted; the rest are the "
        f"target's own tokens.</p>{''.join(_example(example) for example in examples)}"
    )


def _example(example: Example) -> str:
    prompt = example.prompt if len(example.prompt) <= LONGEST_PROMPT else example.prompt[:LONGEST_PROMPT] + " …"
    answer = "".join(f"<mark>{escape(text)}</mark>" if drafted else escape(text) for text, drafted in example.runs)
    return (
        f'<section class="example"><p class="prompt">{escape(prompt)}</p><p class="answer">{answer}</p>'
        f'<p class="soft">{escape(example.benchmark)} · {example.tokens} tokens in {example.forwards} target passes</p>'
        "</section>"
    )


def _method(report: dict[str, Any]) -> str:
    rows = "".join(
        f"<tr><th>{escape(key.replace('_', ' '))}</th><td>{escape(str(value))}</td></tr>"
        for key, value in report["environment"].items()
    )
    return (
        "<p>Both decoders ran on the same prompts in turn, the order swapped every other prompt, after an uncounted "
        "warm-up. Tokens per second are new tokens over the whole decoding time, prefill included. The speedup is the "
        "ratio of the total times per token; its interval is a bootstrap over prompts.</p>"
        f'<div class="scroll"><table class="facts">{rows}</table></div>'
    )
