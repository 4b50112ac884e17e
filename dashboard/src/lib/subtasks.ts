export type Kind = "o" | "l" | "p" | "r" | "a";

/** States of a subtask by the letter that the API sends. */
export const KINDS: { key: Kind; name: string }[] = [
  { key: "a", name: "applied" },
  { key: "p", name: "partly applied" },
  { key: "l", name: "leased" },
  { key: "r", name: "leased again" },
  { key: "o", name: "open" },
];

/** Most squares of the map; each stands for several subtasks if there are more. */
export const SQUARES = 4000;
