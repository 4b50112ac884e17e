import { Button } from "@mantine/core";
import { IconDownload } from "@tabler/icons-react";
import type { Checkpoint, Job } from "../../api/types";
import { metric } from "../../lib/format";

const ICON = { size: 16, stroke: 1.7 };

/** Links to the best and the last of the stored models, which say what each of them is. */
export function Downloads({
  job,
  checkpoints,
}: {
  job: Job;
  checkpoints: Pick<Checkpoint, "best" | "last" | "metrics" | "version">[];
}) {
  const best = checkpoints.find((each) => each.best);
  const last = checkpoints.find((each) => each.last);
  const ranking = job.best?.metric;
  const shownOf = (each: typeof best) =>
    ranking && each?.metrics ? ` (${metric(ranking, each.metrics[ranking])})` : "";
  const link = (name: "best" | "last", text: string, title: string) => (
    <Button
      component="a"
      href={`/api/v1/jobs/${job.id}/checkpoints/${name}`}
      download
      variant={name === "best" || !best ? "filled" : "default"}
      leftSection={<IconDownload {...ICON} />}
      title={title}
    >
      {text}
    </Button>
  );
  return (
    <>
      {best && link("best", `Download best${shownOf(best)}`, `the model with the best ${ranking}`)}
      {last && link("last", `Download last${shownOf(last)}`, "the newest stored model")}
    </>
  );
}
