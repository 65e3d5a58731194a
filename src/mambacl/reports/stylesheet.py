"""The page's style sheet: light and dark, wide and narrow, screen and paper, with the reader's own fonts."""

CSS = """
:root {
  color-scheme: light dark;
  --ground: #f6f7f9; --card: #ffffff; --ink: #1d232b; --quiet: #5c6672; --line: #dde2e8;
  --accent: #0072b2; --shade: 0, 114, 178; --warn-ground: #fff3e2; --warn-line: #e69f00; --code: #f1f3f6;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #14181d; --card: #1c2229; --ink: #e6eaef; --quiet: #9aa5b1; --line: #313a44;
    --accent: #62b5e8; --shade: 62, 150, 205; --warn-ground: #33291a; --warn-line: #c98a00; --code: #151a20;
  }
}
* { box-sizing: border-box; }
html { scroll-behavior: smooth; }
body {
  margin: 0; background: var(--ground); color: var(--ink); line-height: 1.5;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; font-size: 16px;
}
header, main, footer { max-width: 1120px; margin: 0 auto; padding: 0 24px; }
header { padding-top: 36px; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 6px; letter-spacing: -0.01em; overflow-wrap: anywhere; }
h2 { font-size: 1.22rem; margin: 0 0 4px; }
h3 { font-size: 1rem; margin: 20px 0 6px; }
p { margin: 6px 0 12px; }
a { color: var(--accent); }
.facts, .lead, figcaption, .notes, footer { color: var(--quiet); }
.facts { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 0 0 14px; padding: 0; list-style: none; }
.facts b { color: var(--ink); font-weight: 600; }
.status { border: 1px solid currentColor; border-radius: 999px; padding: 0 10px; font-size: 0.85rem; font-weight: 600; }
.status.finished { color: #008660; } .status.open { color: #b36b00; }
@media (prefers-color-scheme: dark) { .status.finished { color: #3fc79a; } .status.open { color: #f0ad3c; } }
nav ul { display: flex; flex-wrap: wrap; gap: 4px 16px; list-style: none; margin: 0 0 18px; padding: 10px 0;
  border-top: 1px solid var(--line); border-bottom: 1px solid var(--line); font-size: 0.92rem; }
nav a { text-decoration: none; } nav a:hover { text-decoration: underline; }
.banner { background: var(--warn-ground); border: 1px solid var(--warn-line); border-left-width: 5px;
  border-radius: 8px; padding: 10px 16px; margin: 0 0 18px; }
.banner p { margin: 4px 0; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(200px, 1fr)); gap: 14px;
  margin: 0 0 20px; padding: 0; }
.cards > div { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 14px 18px; }
.cards dt { color: var(--quiet); font-size: 0.9rem; }
.cards dd { margin: 0; }
.cards .figure { font-size: 2rem; font-weight: 650; line-height: 1.25; font-variant-numeric: tabular-nums; }
.cards .figure small { font-size: 1.05rem; font-weight: 500; color: var(--quiet); }
.cards .what { font-size: 0.83rem; color: var(--quiet); line-height: 1.35; }
.cards > div:first-child { border-top: 3px solid var(--accent); padding-top: 12px; }
main > section { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 20px 24px 22px;
  margin: 0 0 20px; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); gap: 18px;
  align-items: center; }
figure { margin: 14px 0 0; }
figure img { display: block; max-width: 100%; height: auto; margin: 0 auto; background: #fff; border-radius: 8px; }
@media (prefers-color-scheme: dark) { figure img { padding: 8px; } }
figcaption { font-size: 0.88rem; margin-top: 6px; }
.wide { overflow-x: auto; max-width: 100%; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.94rem; margin: 8px 0; }
table.full { width: 100%; }
caption { text-align: left; color: var(--quiet); font-size: 0.9rem; padding-bottom: 6px; }
th, td { padding: 6px 12px; text-align: right; border-bottom: 1px solid var(--line); vertical-align: top; }
td { white-space: nowrap; }
thead th { border-bottom: 2px solid var(--quiet); font-weight: 600; vertical-align: bottom; line-height: 1.25; }
th.text, td.text { text-align: left; white-space: normal; overflow-wrap: break-word; }
th[scope=row].text { min-width: 9em; }
table.dense { font-size: 0.86rem; } table.dense th, table.dense td { padding: 5px 6px; }
td .std { color: var(--quiet); font-size: 0.86em; }
table.matrix { font-size: 0.86rem; }
table.matrix th, table.matrix td { padding: 4px 8px; text-align: center; border: 0; }
table.matrix td { border: 2px solid var(--card); border-radius: 5px; } table.matrix td.total { font-weight: 600; }
table.matrix thead th { border-bottom: 1px solid var(--line); }
table.matrix .row { text-align: right; white-space: nowrap; }
table.matrix.large { font-size: 0.68rem; } table.matrix.large th, table.matrix.large td { padding: 2px 3px; }
.notes { font-size: 0.86rem; padding-left: 1.2em; margin: 6px 0 10px; }
.names { display: flex; flex-wrap: wrap; gap: 4px 6px; margin: 0; padding: 0; list-style: none; }
.names li { background: var(--code); border-radius: 5px; padding: 0 8px; font-size: 0.86rem; overflow-wrap: anywhere; }
.names.todo li { opacity: 0.6; }
details { margin: 10px 0; } summary { cursor: pointer; color: var(--accent); }
pre { background: var(--code); border: 1px solid var(--line); border-radius: 8px; padding: 10px 14px; overflow: auto;
  max-height: 30rem; font-size: 0.84rem; line-height: 1.45; margin: 8px 0; }
pre.copy { user-select: all; -webkit-user-select: all; }
code, pre { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "Liberation Mono", monospace; }
code { font-size: 0.9em; overflow-wrap: anywhere; }
.bar { display: flex; height: 22px; border-radius: 6px; overflow: hidden; margin: 10px 0 6px; gap: 2px; }
.keys { display: flex; flex-wrap: wrap; gap: 2px 20px; list-style: none; margin: 0 0 8px; padding: 0;
  font-size: 0.92rem; }
.keys i { display: inline-block; width: 0.75em; height: 0.75em; border-radius: 3px; margin-right: 7px; }
footer { font-size: 0.85rem; padding-bottom: 40px; }
@media (max-width: 640px) { header, main, footer { padding-left: 12px; padding-right: 12px; }
  main > section { padding: 16px 14px; } .cards { grid-template-columns: 1fr 1fr; }
  .cards .figure { font-size: 1.5rem; } }
@media print { body { background: #fff; } nav { display: none; } main > section, figure { break-inside: avoid; }
  main > section { border: 0; padding: 0 0 12px; } * { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""
