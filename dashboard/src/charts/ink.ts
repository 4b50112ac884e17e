/** Colors of the theme for canvas drawings. */
export type Ink = {
  text: string;
  dim: string;
  line: string;
  panel: string;
  accent: string;
  good: string;
  warn: string;
  bad: string;
};

export function readInk(): Ink {
  const style = getComputedStyle(document.documentElement);
  const of = (name: string) => style.getPropertyValue(name).trim() || "#888";
  return {
    text: of("--mantine-color-text"),
    dim: of("--mantine-color-dimmed"),
    line: of("--line"),
    panel: of("--panel"),
    accent: of("--accent"),
    good: of("--good-mark"),
    warn: of("--warn-mark"),
    bad: of("--bad-mark"),
  };
}
