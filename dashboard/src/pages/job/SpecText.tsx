import { Button, CopyButton, Skeleton } from "@mantine/core";
import { useSpecText } from "../../api/jobs";
import type { Job } from "../../api/types";
import { ErrorState } from "../../components/ErrorState";
import { Panel } from "../../components/Panel";
import classes from "./SpecText.module.css";

/** Spec of the job as YAML. */
export function SpecText({ job }: { job: Job }) {
  const spec = useSpecText(job.id);
  return (
    <Panel
      title="job.yaml"
      note={`package ${job.package.slice(0, 12)}`}
      tools={
        <CopyButton value={spec.data ?? ""}>
          {({ copied, copy }) => (
            <Button size="compact-xs" variant="default" onClick={copy}>
              {copied ? "Copied" : "Copy"}
            </Button>
          )}
        </CopyButton>
      }
      flush
    >
      {spec.isPending && <Skeleton height={200} />}
      {spec.isError && <ErrorState error={spec.error} onRetry={spec.refetch} />}
      {spec.data && (
        // biome-ignore lint/a11y/noNoninteractiveTabindex: a scrollable area must be reachable by keyboard
        <section className={classes.text} tabIndex={0} aria-label="job.yaml">
          <pre>{spec.data}</pre>
        </section>
      )}
    </Panel>
  );
}
