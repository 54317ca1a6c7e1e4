"""How the page looks; the colours of pictures/svg.py's stylesheet stand before it."""

STYLE = """
* { box-sizing: border-box; }
html { background: var(--surface); color: var(--text); -webkit-text-size-adjust: 100%; }
body { margin: 0; font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "Liberation Sans", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 24px 16px 64px; }
h1 { margin: 0; font-size: 26px; line-height: 1.25; overflow-wrap: anywhere; }
h2 { margin: 44px 0 10px; font-size: 19px; overflow-wrap: anywhere; }
p { margin: 6px 0; overflow-wrap: anywhere; }
header { margin-bottom: 20px; }
header p, .note, figcaption, small { color: var(--muted); }
.note { margin-top: 14px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 15px; font-variant-numeric: tabular-nums; }
th, td { padding: 6px 20px 6px 0; border-bottom: 1px solid var(--grid); text-align: left; vertical-align: top; min-width: 7em; }
thead th { font-weight: 600; border-bottom-color: var(--axis); }
tbody th { font-weight: 400; color: var(--muted); }
td small { display: block; font-size: 13px; line-height: 1.35; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(200px, 1fr)); gap: 18px 28px; margin: 0; }
dt { font-size: 14px; color: var(--muted); }
dd { margin: 0; font-size: 20px; font-variant-numeric: tabular-nums; }
dd small { display: block; font-size: 13px; line-height: 1.35; }
.figures { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 40px 36px; margin-top: 40px; }
figure { margin: 0; min-width: 0; }
.wide { grid-column: 1 / -1; }
.narrow { display: none; }
.picture { display: block; width: 100%; height: auto; }
figcaption { margin-top: 8px; font-size: 14px; line-height: 1.45; }
details { margin-top: 28px; }
summary { cursor: pointer; font-weight: 600; overflow-wrap: anywhere; }
pre { margin: 10px 0 0; padding: 14px; overflow-x: auto; background: var(--band); border-radius: 6px; font-size: 13px; }
@media (max-width: 760px) {
  main { padding-top: 16px; }
  .figures { grid-template-columns: minmax(0, 1fr); gap: 36px; }
  .broad { display: none; }
  .narrow { display: block; }
  dl { grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 16px 20px; }
  th, td { padding-right: 14px; min-width: 8em; }
}
"""
