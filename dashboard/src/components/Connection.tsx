import { Tooltip } from "@mantine/core";
import type { Connection as State } from "../api/live";
import classes from "./Connection.module.css";

const WORDS: Record<State, { word: string; help: string }> = {
  connecting: { word: "Connecting", help: "Waiting for live updates" },
  live: { word: "Live", help: "Updates arrive as they happen" },
  broken: { word: "Offline", help: "Connection lost; reconnecting automatically" },
};

/** State of the connection for live updates. */
export function Connection({ state }: { state: State }) {
  const { word, help } = WORDS[state];
  return (
    <Tooltip label={help}>
      <span className={classes.connection} data-state={state} role="status">
        {word}
      </span>
    </Tooltip>
  );
}
