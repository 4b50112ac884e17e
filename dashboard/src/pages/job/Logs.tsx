import { Select, Switch, TextInput } from "@mantine/core";
import { useEffect, useRef, useState } from "react";
import { KEPT, useLogs } from "../../api/tail";
import type { Job, LogLine } from "../../api/types";
import { EmptyState } from "../../components/EmptyState";
import { Panel } from "../../components/Panel";
import { clock, count } from "../../lib/format";
import classes from "./Logs.module.css";

/** Live output of the workers. */
export function Logs({ job }: { job: Job }) {
  const { lines, state, ended } = useLogs(job.id);
  const [worker, setWorker] = useState<string | null>(null);
  const [text, setText] = useState("");
  const [following, setFollowing] = useState(true);
  const matching = lines.filter(
    (each) => (!worker || each.worker === worker) && each.line.includes(text),
  );
  return (
    <Panel
      title="Logs"
      note={noteOf(lines.length, ended, state === "broken")}
      tools={
        <>
          <Switch
            size="xs"
            label="Follow"
            checked={following}
            onChange={(event) => setFollowing(event.currentTarget.checked)}
          />
          <Select
            size="xs"
            aria-label="Worker"
            placeholder="All workers"
            clearable
            data={[...new Set(lines.map((each) => each.worker))].sort()}
            value={worker}
            onChange={setWorker}
          />
          <TextInput
            size="xs"
            aria-label="Search lines"
            placeholder="Search"
            value={text}
            onChange={(event) => setText(event.currentTarget.value)}
          />
        </>
      }
      flush
    >
      {matching.length === 0 ? (
        <EmptyState title={lines.length ? "No matching lines" : "No output yet"}>
          {!lines.length && "Output of the task on its workers appears here."}
        </EmptyState>
      ) : (
        <Lines lines={matching} following={following} />
      )}
    </Panel>
  );
}

function noteOf(number: number, ended: boolean, broken: boolean): string {
  if (broken) return "connection lost; reconnecting";
  const kept = number >= KEPT ? `the newest ${count(KEPT)} lines` : `${count(number)} lines`;
  return ended ? `${kept}, complete` : kept;
}

function Lines({ lines, following }: { lines: LogLine[]; following: boolean }) {
  const box = useRef<HTMLElement>(null);
  // biome-ignore lint/correctness/useExhaustiveDependencies: it scrolls when lines are added
  useEffect(() => {
    if (following && box.current) box.current.scrollTop = box.current.scrollHeight;
  }, [lines, following]);
  return (
    // biome-ignore lint/a11y/noNoninteractiveTabindex: a scrollable area must be reachable by keyboard
    <section ref={box} className={classes.lines} tabIndex={0} aria-label="Lines">
      {lines.map((each) => (
        <div key={each.id} className={classes.line}>
          <time className={classes.time}>{clock(each.at)}</time>
          <span className={classes.worker} title={each.worker}>
            {each.worker.slice(-12)}
          </span>
          <span className={classes.text}>{each.line}</span>
        </div>
      ))}
    </section>
  );
}
