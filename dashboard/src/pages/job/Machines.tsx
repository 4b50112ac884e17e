import { isOver, useMachines } from "../../api/jobs";
import type { Job, Machine } from "../../api/types";
import { EmptyState } from "../../components/EmptyState";
import { ErrorState } from "../../components/ErrorState";
import { Panel } from "../../components/Panel";
import { clock } from "../../lib/format";
import { bulks, stateOf } from "../../lib/timeline";
import { useNow } from "../../lib/useNow";
import { Timeline } from "./Timeline";

/** Machines that came and went. */
export function Machines({ job }: { job: Job }) {
  const machines = useMachines(job.id);
  const now = useNow(!isOver(job));
  const until = Math.min(now, job.ended_at ?? now);
  const lanes = machines.data ?? [];
  return (
    <Panel title="Machines" note={lanes.length ? counted(lanes, until) : undefined}>
      {machines.isError && !machines.data ? (
        <ErrorState error={machines.error} onRetry={machines.refetch} />
      ) : lanes.length === 0 ? (
        <EmptyState title="No machines yet">
          {isOver(job)
            ? "It ended before it had any."
            : "They are ordered as soon as a pool has some."}
        </EmptyState>
      ) : (
        <Timeline machines={lanes} now={until} over={isOver(job)} />
      )}
    </Panel>
  );
}

function counted(machines: Machine[], now: number): string {
  const lost = machines.filter((each) => stateOf(each) === "dead").length;
  const together = bulks(machines, now).map(
    (each) => `, ${each.lost.length} of them at once at ${clock(each.at)}`,
  );
  return `${machines.length} so far, ${lost} lost${together.slice(-1).join("")}`;
}
