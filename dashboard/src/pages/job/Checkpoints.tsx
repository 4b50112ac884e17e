import { ActionIcon, Badge } from "@mantine/core";
import { IconDownload } from "@tabler/icons-react";
import { isOver, useCheckpoints } from "../../api/jobs";
import type { Checkpoint, Job } from "../../api/types";
import { type Column, DataTable } from "../../components/DataTable";
import { ErrorState } from "../../components/ErrorState";
import { LOADING, Panel } from "../../components/Panel";
import { bytes, clock, count, DASH, metric } from "../../lib/format";
import classes from "./Checkpoints.module.css";
import { Downloads } from "./Downloads";

/** Checkpoints of the job, newest first. */
export function Checkpoints({ job }: { job: Job }) {
  const checkpoints = useCheckpoints(job.id);
  const rows = [...(checkpoints.data ?? [])].reverse();
  return (
    <Panel
      title="Checkpoints"
      // The page's head has them once the job has ended.
      tools={job.model ? undefined : <Downloads job={job} checkpoints={rows} />}
      note={`the newest ${job.spec.checkpoint?.keep ?? 3} and the best checkpoints are kept`}
      empty={
        rows.length || checkpoints.isError
          ? undefined
          : checkpoints.isPending
            ? LOADING
            : isOver(job)
              ? "None were written."
              : "None yet: the first checkpoint follows the first evaluation."
      }
      flush
    >
      {checkpoints.isError && !checkpoints.data ? (
        <ErrorState error={checkpoints.error} onRetry={checkpoints.refetch} />
      ) : (
        <DataTable label="Checkpoints" columns={columns(job)} rows={rows} id={(row) => row.name} />
      )}
    </Panel>
  );
}

/** Marks of the best and the last model. */
function Marks({ row }: { row: Checkpoint }) {
  return (
    <>
      {row.best && (
        <Badge
          miw="max-content"
          size="sm"
          variant="default"
          tt="none"
          ml={6}
          className={classes.best}
        >
          best
        </Badge>
      )}
      {row.last && (
        <Badge miw="max-content" size="sm" variant="default" tt="none" ml={6}>
          last
        </Badge>
      )}
    </>
  );
}

function columns(job: Job): Column<Checkpoint>[] {
  const ranking = job.best?.metric;
  return [
    {
      name: "Version",
      key: (row) => row.version,
      cell: (row) => (
        <>
          {count(row.version)} <Marks row={row} />
        </>
      ),
    },
    { name: "Evaluated", cell: (row) => row.place ?? DASH },
    ...(ranking
      ? [
          {
            name: ranking,
            right: true,
            key: (row: Checkpoint) => row.metrics?.[ranking],
            cell: (row: Checkpoint) => metric(ranking, row.metrics?.[ranking]),
          },
        ]
      : []),
    { name: "Epochs", right: true, wide: true, cell: (row) => row.finished_epochs ?? DASH },
    { name: "Samples", right: true, wide: true, cell: (row) => count(row.samples) },
    { name: "Written", right: true, wide: true, cell: (row) => clock(row.at) },
    {
      name: "Size",
      right: true,
      wide: true,
      key: (row) => row.size,
      cell: (row) => bytes(row.size),
    },
    {
      name: "SHA-256",
      wide: true,
      cell: (row) => (
        <span className="mono" title={row.digest}>
          {row.digest.slice(0, 12)}
        </span>
      ),
    },
    {
      name: "File",
      right: true,
      cell: (row) => (
        <ActionIcon
          component="a"
          href={`/api/v1/jobs/${job.id}/checkpoints/${row.name}`}
          download
          variant="subtle"
          aria-label={`Download version ${row.version}`}
        >
          <IconDownload size={17} stroke={1.7} />
        </ActionIcon>
      ),
    },
  ];
}
