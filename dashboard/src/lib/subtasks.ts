export type Kind = "o" | "l" | "p" | "r" | "a";

/** States of a subtask by the letter that the API sends. */
export const KINDS: { key: Kind; name: string }[] = [
  { key: "a", name: "applied" },
  { key: "p", name: "partly applied" },
  { key: "l", name: "in training" },
  { key: "r", name: "again after a loss" },
  { key: "o", name: "waiting" },
];

/** Most squares of the map; each stands for several subtasks if there are more. */
export const SQUARES = 4000;
