import { lookOf } from "../lib/states";
import classes from "./StateBadge.module.css";

/** State as a word with a colored dot. */
export function StateBadge({ state }: { state: string }) {
  const { word, tone } = lookOf(state);
  return (
    <span className={classes.badge} data-tone={tone}>
      {word}
    </span>
  );
}
