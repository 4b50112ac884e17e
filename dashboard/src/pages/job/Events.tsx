import { MultiSelect, TextInput } from "@mantine/core";
import { useState } from "react";
import { KEPT, useEvents } from "../../api/tail";
import type { Job, JobEvent } from "../../api/types";
import { EmptyState } from "../../components/EmptyState";
import { ErrorState } from "../../components/ErrorState";
import { Panel } from "../../components/Panel";
import { clock, count } from "../../lib/format";
import classes from "./Events.module.css";

/** Maximum number of shown events; filters search all that the page keeps. */
const SHOWN = 300;
const BAD = /kill|fail|crash|lost|refused|missing|reject|quarantine|damaged/;
const WARN = /evict|notice|advice|pause|stopped|budget|rolled/;

/** Events of the job, newest first. */
export function Events({ job }: { job: Job }) {
  const events = useEvents(job.id);
  const [kinds, setKinds] = useState<string[]>([]);
  const [text, setText] = useState("");
  const all = events.data ?? [];
  const matching = all.filter((each) => matches(each, kinds, text)).reverse();
  const newest = matching.length > SHOWN ? `the newest ${SHOWN} of ` : "";
  const kept = all.length >= KEPT ? `, among the job's last ${count(KEPT)}` : "";
  return (
    <Panel
      title="Events"
      note={`${newest}${count(matching.length)}${kept}`}
      tools={
        <>
          <MultiSelect
            size="xs"
            aria-label="Kinds"
            placeholder={kinds.length ? undefined : "Any kind"}
            data={[...new Set(all.map((each) => each.kind))].sort()}
            value={kinds}
            onChange={setKinds}
            clearable
            maw={260}
          />
          <TextInput
            size="xs"
            aria-label="Search events"
            placeholder="Search"
            value={text}
            onChange={(event) => setText(event.currentTarget.value)}
          />
        </>
      }
      flush
    >
      {events.isError && !events.data ? (
        <ErrorState error={events.error} onRetry={events.refetch} />
      ) : matching.length === 0 ? (
        <EmptyState title={all.length ? "No matching events" : "No events yet"} />
      ) : (
        <ol className={classes.list}>
          {matching.slice(0, SHOWN).map((each) => (
            <li key={each.id} className={classes.event} data-tone={tone(each.kind)}>
              <time className={classes.time}>{clock(each.at)}</time>
              <span className={classes.kind}>{each.kind}</span>
              <span className={classes.text}>{each.text}</span>
            </li>
          ))}
        </ol>
      )}
    </Panel>
  );
}

function matches(event: JobEvent, kinds: string[], text: string): boolean {
  const search = text.trim().toLowerCase();
  return (
    (kinds.length === 0 || kinds.includes(event.kind)) &&
    `${event.kind} ${event.text}`.toLowerCase().includes(search)
  );
}

function tone(kind: string): string | undefined {
  if (BAD.test(kind)) return "bad";
  return WARN.test(kind) ? "warn" : undefined;
}
