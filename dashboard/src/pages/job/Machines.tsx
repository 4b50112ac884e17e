import { isOver, useMachines } from "../../api/jobs";
import { useCaller } from "../../api/session";
import type { Job, Machine } from "../../api/types";
import { EmptyState } from "../../components/EmptyState";
import { ErrorState } from "../../components/ErrorState";
import { Panel } from "../../components/Panel";
import { refusal } from "../../lib/access";
import { clock } from "../../lib/format";
import { bulks, stateOf } from "../../lib/timeline";
import { useNow } from "../../lib/useNow";
import { Timeline } from "./Timeline";

/** Machines of the job over time. */
export function Machines({ job }: { job: Job }) {
  const machines = useMachines(job.id);
  const now = useNow(!isOver(job));
  const caller = useCaller();
  const mayEvict = !isOver(job) && refusal(caller, "admin") === null;
  const until = Math.min(now, job.ended_at ?? now);
  const lanes = machines.data ?? [];
  return (
    <Panel title="Machines" note={lanes.length ? noteOf(lanes, until) : undefined}>
      {machines.isError && !machines.data ? (
        <ErrorState error={machines.error} onRetry={machines.refetch} />
      ) : lanes.length === 0 ? (
        <EmptyState title="No machines yet">
          {isOver(job)
            ? "The job ended before a machine started."
            : "Machines start as soon as a pool has capacity."}
        </EmptyState>
      ) : (
        <Timeline machines={lanes} now={until} mayEvict={mayEvict} />
      )}
    </Panel>
  );
}

function noteOf(machines: Machine[], now: number): string {
  const lost = machines.filter((each) => stateOf(each) === "dead").length;
  const bulkLosses = bulks(machines, now).map(
    (each) => `, ${each.lost.length} of them at once at ${clock(each.at)}`,
  );
  return `${machines.length} so far, ${lost} lost${bulkLosses.slice(-1).join("")}`;
}
