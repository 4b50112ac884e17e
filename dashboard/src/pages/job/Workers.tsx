import { isOver, useJobWorkers } from "../../api/jobs";
import type { Job, Worker } from "../../api/types";
import { type Column, DataTable } from "../../components/DataTable";
import { EmptyState } from "../../components/EmptyState";
import { ErrorState } from "../../components/ErrorState";
import { LOADING, Panel } from "../../components/Panel";
import { bytes, count, DASH, decimal, duration, percent } from "../../lib/format";
import { busy, gpuMemory, hasGpu, memoryInUse } from "../../lib/gpus";
import { useNow } from "../../lib/useNow";

/** Workers of the job, with what each one moves over the network. */
export function Workers({ job }: { job: Job }) {
  const workers = useJobWorkers(job.id);
  const now = useNow(!isOver(job));
  const rows = workers.data ?? [];
  const { pushed_bytes, fetched_bytes } = job.traffic;
  return (
    <Panel
      title="Workers"
      note={`all workers so far: ${bytes(pushed_bytes)} pushed, ${bytes(fetched_bytes)} fetched`}
      empty={workers.isPending ? LOADING : undefined}
      flush
    >
      {workers.isError && !workers.data ? (
        <ErrorState error={workers.error} onRetry={workers.refetch} />
      ) : rows.length === 0 ? (
        <EmptyState title="No workers">
          {isOver(job) ? "The job has ended." : "Workers start on machines of the job's pools."}
        </EmptyState>
      ) : (
        <DataTable
          label="Workers"
          columns={columns(now, rows.some(hasGpu))}
          rows={rows}
          id={(row) => row.name}
        />
      )}
    </Panel>
  );
}

function columns(now: number, gpus: boolean): Column<Worker>[] {
  const silence = (row: Worker) => (row.at === null ? null : Math.max(0, now - row.at));
  return [
    {
      name: "Worker",
      key: (row) => row.name,
      cell: (row) => <span className="mono">{row.name.replace(`${row.job}.`, "")}</span>,
    },
    {
      name: "Activity",
      wraps: true,
      key: activity,
      cell: (row) => activity(row) ?? DASH,
    },
    ...(gpus ? GPU_COLUMNS : []),
    {
      name: "Memory",
      right: true,
      wide: true,
      key: (row) => row.resident_bytes,
      cell: (row) => bytes(row.resident_bytes),
    },
    {
      name: "Samples",
      right: true,
      wide: true,
      key: (row) => row.samples,
      cell: (row) => count(row.samples),
    },
    {
      name: "Samples/s",
      right: true,
      key: (row) => row.samples_per_second,
      cell: (row) => decimal(row.samples_per_second, 1),
    },
    {
      name: "Seconds per step",
      right: true,
      wide: true,
      key: (row) => row.step_seconds,
      cell: (row) => decimal(row.step_seconds, 3),
    },
    {
      name: "Steps per push",
      right: true,
      wide: true,
      key: (row) => row.local_steps,
      cell: (row) => count(row.local_steps),
    },
    {
      name: "Pushes",
      right: true,
      wide: true,
      key: (row) => row.pushes,
      cell: (row) => count(row.pushes),
    },
    {
      name: "Pushed",
      right: true,
      wide: true,
      key: (row) => row.pushed_bytes,
      cell: (row) => bytes(row.pushed_bytes),
    },
    {
      name: "Fetched",
      right: true,
      wide: true,
      key: (row) => row.fetched_bytes,
      cell: (row) => bytes(row.fetched_bytes),
    },
    {
      name: "Last heartbeat",
      right: true,
      wide: true,
      key: silence,
      cell: (row) => (row.at === null ? DASH : `${duration(silence(row))} ago`),
    },
  ];
}

/** Only for jobs with GPUs, because the table is wide. */
const GPU_COLUMNS: Column<Worker>[] = [
  { name: "Device", wide: true, key: (row) => row.device, cell: (row) => row.device ?? DASH },
  {
    name: "GPU busy",
    right: true,
    wide: true,
    key: (row) => row.gpu_utilization,
    cell: (row) => percent(busy(row)),
  },
  {
    name: "FLOPs used",
    right: true,
    wide: true,
    key: (row) => row.flops_utilization,
    cell: (row) => percent(row.flops_utilization),
  },
  {
    name: "GPU memory in use",
    right: true,
    wide: true,
    key: gpuMemory,
    cell: (row) => memoryInUse(row) ?? DASH,
  },
];

function activity(row: Worker): string | null {
  const doing = row.quarantined ?? row.leaving ?? row.doing;
  return doing === "drain" ? "asked to leave" : doing;
}
