import { Button, Group, Modal, NumberInput, Text } from "@mantine/core";
import { useState } from "react";
import { useCost } from "../../api/jobs";
import type { Job } from "../../api/types";
import { usd } from "../../lib/format";

/** Dialog that resumes a job with a budget, and can raise the budget. */
export function Resume({
  job,
  opened,
  onClose,
  onResume,
}: {
  job: Job;
  opened: boolean;
  onClose: () => void;
  onResume: (budget: number | undefined) => void;
}) {
  const current = job.spec.stop?.max_cost_usd ?? undefined;
  const spent = useCost(job.id).data?.spent_usd;
  const [budget, setBudget] = useState<number | string>(current ?? "");
  const amount = typeof budget === "number" && budget > 0 ? budget : undefined;
  const least = spent ?? 0;
  const enough = amount === undefined || amount > least;
  return (
    <Modal opened={opened} onClose={onClose} title={`Resume ${job.id}`} centered>
      <Text size="sm" mb="md">
        The job has spent {usd(spent)}. It pauses before it exceeds its budget.
      </Text>
      <NumberInput
        label="Total budget in USD"
        value={budget}
        onChange={setBudget}
        min={0}
        decimalScale={2}
        prefix="$"
        error={enough ? undefined : `The job has already spent ${usd(least)}`}
        data-autofocus
      />
      <Group justify="flex-end" mt="lg">
        <Button variant="default" onClick={onClose}>
          Keep paused
        </Button>
        <Button
          disabled={!enough || amount === undefined}
          onClick={() => onResume(amount === current ? undefined : amount)}
        >
          Resume the job
        </Button>
      </Group>
    </Modal>
  );
}
