import classes from "./StateBadge.module.css";

const TONES: Record<string, "live" | "good" | "bad" | "warn" | "quiet"> = {
  starting: "live",
  running: "live",
  finishing: "live",
  paused: "warn",
  succeeded: "good",
  failed: "bad",
  cancelled: "quiet",
  booting: "quiet",
  training: "good",
  leaving: "warn",
  notice: "warn",
  draining: "warn",
  dead: "bad",
  terminated: "bad",
  idle: "quiet",
};

/** State as a word with a colored dot. */
export function StateBadge({ state }: { state: string }) {
  return (
    <span className={classes.badge} data-tone={TONES[state] ?? "quiet"}>
      {state}
    </span>
  );
}
