export type Kind = "o" | "l" | "p" | "r" | "a";

/** States of a subtask by the letter that the API sends. */
export const KINDS: { key: Kind; name: string }[] = [
  { key: "a", name: "applied" },
  { key: "p", name: "partly applied" },
  { key: "l", name: "leased" },
  { key: "r", name: "leased again" },
  { key: "o", name: "open" },
];

/** Counts the subtasks in each state. */
export function tally(states: string): Record<Kind, number> {
  const counts: Record<Kind, number> = { o: 0, l: 0, p: 0, r: 0, a: 0 };
  for (const letter of states) {
    if (letter in counts) counts[letter as Kind] += 1;
  }
  return counts;
}
