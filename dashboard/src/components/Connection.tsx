import { Tooltip } from "@mantine/core";
import type { Connection as State } from "../api/live";
import classes from "./Connection.module.css";

const WORDS: Record<State, { word: string; help: string }> = {
  connecting: { word: "Connecting", help: "Waiting for the stream of news" },
  live: { word: "Live", help: "News arrive as they happen" },
  broken: { word: "Offline", help: "The connection broke; it is tried again by itself" },
};

/** Whether what is shown is what is. */
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
