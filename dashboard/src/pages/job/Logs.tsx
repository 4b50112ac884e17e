import { Select, Switch, TextInput } from "@mantine/core";
import { useDebouncedValue } from "@mantine/hooks";
import { IconSearch } from "@tabler/icons-react";
import { useEffect, useRef, useState } from "react";
import { KEPT, useLogs } from "../../api/tail";
import type { Job, LogLine } from "../../api/types";
import { EmptyState } from "../../components/EmptyState";
import { LOADING, Panel } from "../../components/Panel";
import { clock, count } from "../../lib/format";
import classes from "./Logs.module.css";

const TYPING_MS = 350;
/** Words for the levels; output of a task has none. */
const WORDS: Record<LogLine["level"], string> = {
  out: "",
  err: "stderr",
  debug: "debug",
  info: "info",
  warning: "warning",
  error: "error",
};

/** What the workers print and log, live. */
export function Logs({ job }: { job: Job }) {
  const [worker, setWorker] = useState("");
  const [text, setText] = useState("");
  const [grep] = useDebouncedValue(text, TYPING_MS);
  const [following, setFollowing] = useState(true);
  const { lines, state, ended } = useLogs(job.id, { worker, grep });
  const workers = useSeen(lines);
  const selected = Boolean(worker || grep);
  const loading = state === "connecting" && lines.length === 0;
  return (
    <Panel
      title="Logs"
      note={loading ? LOADING : noteOf(lines.length, ended, state === "broken", selected)}
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
            data={workers.map((each) => ({ value: each, label: machineOf(each) }))}
            value={worker || null}
            onChange={(next) => setWorker(next ?? "")}
          />
          <TextInput
            size="xs"
            aria-label="Search lines"
            placeholder="Search all lines"
            leftSection={<IconSearch size={14} />}
            value={text}
            onChange={(event) => setText(event.currentTarget.value)}
          />
        </>
      }
      flush
    >
      {loading ? null : lines.length === 0 ? (
        <EmptyState title={selected ? "No matching lines" : ended ? "No output" : "No output yet"}>
          {selected
            ? "Change the search or the worker."
            : "What the task prints and logs on its workers appears here."}
        </EmptyState>
      ) : (
        <Lines lines={lines} following={following} text={grep} />
      )}
    </Panel>
  );
}

/** Returns the workers of all lines so far, also of those that are not selected any more. */
function useSeen(lines: LogLine[]): string[] {
  const [seen, setSeen] = useState<string[]>([]);
  const fresh = new Set(lines.map((each) => each.worker).filter((each) => !seen.includes(each)));
  if (fresh.size > 0) setSeen([...seen, ...fresh].sort());
  return seen;
}

/** Returns the end of a worker's name: its machine, which is unique in a job. */
function machineOf(worker: string): string {
  return worker.slice(worker.lastIndexOf(".") + 1);
}

function noteOf(number: number, ended: boolean, broken: boolean, selected: boolean): string {
  if (broken) return "connection lost; reconnecting";
  const lines = `${count(number)} ${selected ? "matching " : ""}line${number === 1 ? "" : "s"}`;
  const kept = number >= KEPT ? `the newest ${lines}` : lines;
  return ended ? `${kept}, complete` : kept;
}

function Lines({ lines, following, text }: { lines: LogLine[]; following: boolean; text: string }) {
  const box = useRef<HTMLElement>(null);
  // biome-ignore lint/correctness/useExhaustiveDependencies: it scrolls when lines are added
  useEffect(() => {
    if (following && box.current) box.current.scrollTop = box.current.scrollHeight;
  }, [lines, following]);
  return (
    // biome-ignore lint/a11y/noNoninteractiveTabindex: a scrollable area must be reachable by keyboard
    <section ref={box} className={classes.lines} tabIndex={0} aria-label="Lines">
      {lines.map((each) => (
        <div key={each.id} className={classes.line} data-level={each.level}>
          <time className={classes.time}>{clock(each.at)}</time>
          <span className={classes.worker} title={each.worker}>
            {machineOf(each.worker).slice(-12)}
          </span>
          <span className={classes.level}>{WORDS[each.level]}</span>
          <span className={classes.text}>
            <Marked line={each.line} text={text} />
          </span>
        </div>
      ))}
    </section>
  );
}

/** A line with the text that was searched for marked. */
function Marked({ line, text }: { line: string; text: string }) {
  const at = text ? line.toLowerCase().indexOf(text.toLowerCase()) : -1;
  if (at < 0) return line;
  return (
    <>
      {line.slice(0, at)}
      <mark className={classes.found}>{line.slice(at, at + text.length)}</mark>
      {line.slice(at + text.length)}
    </>
  );
}
