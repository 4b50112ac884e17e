/** Words and colors of the states of jobs and machines: one color per state, on every page. */

/** Color of a state, as in `app.css`: `--state-<tone>`. */
export type Tone =
  | "queued"
  | "starting"
  | "working"
  | "done"
  | "notice"
  | "leaving"
  | "evicted"
  | "failed"
  | "idle";

type Look = { word: string; tone: Tone };

const LOOKS: Record<string, Look> = {
  queued: { word: "queued", tone: "starting" },
  starting: { word: "starting", tone: "starting" },
  waiting: { word: "waiting", tone: "starting" },
  booting: { word: "starting", tone: "starting" },
  running: { word: "running", tone: "working" },
  training: { word: "training", tone: "working" },
  finishing: { word: "finishing", tone: "working" },
  succeeded: { word: "succeeded", tone: "done" },
  paused: { word: "paused", tone: "notice" },
  notice: { word: "eviction notice", tone: "notice" },
  leaving: { word: "leaving", tone: "leaving" },
  draining: { word: "leaving", tone: "leaving" },
  evicted: { word: "evicted", tone: "evicted" },
  dead: { word: "killed", tone: "failed" },
  failed: { word: "failed", tone: "failed" },
  cancelled: { word: "cancelled", tone: "idle" },
  given: { word: "given to another job", tone: "idle" },
  gone: { word: "released", tone: "idle" },
  terminated: { word: "released", tone: "idle" },
  idle: { word: "idle", tone: "idle" },
};

/** Returns the look of a state; an unknown one keeps its own word. */
export function lookOf(state: string): Look {
  return LOOKS[state] ?? { word: state, tone: "idle" };
}
