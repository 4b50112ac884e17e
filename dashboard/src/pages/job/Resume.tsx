import { Button, Group, Modal, NumberInput, Text } from "@mantine/core";
import { useState } from "react";
import { useCost } from "../../api/jobs";
import type { Job } from "../../api/types";
import { usd } from "../../lib/format";

/** Lets a job that has a budget go on, with more of it if it is wanted. */
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
  const present = job.spec.stop?.max_cost_usd ?? undefined;
  const spent = useCost(job.id).data?.spent_usd;
  const [budget, setBudget] = useState<number | string>(present ?? "");
  const wanted = typeof budget === "number" && budget > 0 ? budget : undefined;
  const least = spent ?? 0;
  const enough = wanted === undefined || wanted > least;
  return (
    <Modal opened={opened} onClose={onClose} title={`Resume ${job.id}`} centered>
      <Text size="sm" mb="md">
        It has spent {usd(spent)}, and pauses before it spends more than its budget.
      </Text>
      <NumberInput
        label="Budget in USD, all in all"
        value={budget}
        onChange={setBudget}
        min={0}
        decimalScale={2}
        prefix="$"
        error={enough ? undefined : `${usd(least)} are spent already`}
        data-autofocus
      />
      <Group justify="flex-end" mt="lg">
        <Button variant="default" onClick={onClose}>
          Leave it paused
        </Button>
        <Button
          disabled={!enough || wanted === undefined}
          onClick={() => onResume(wanted === present ? undefined : wanted)}
        >
          Resume the job
        </Button>
      </Group>
    </Modal>
  );
}
