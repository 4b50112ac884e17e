import { Button, Group, Modal, Text } from "@mantine/core";
import { useDisclosure } from "@mantine/hooks";
import { notifications } from "@mantine/notifications";
import { IconPlayerPause, IconPlayerPlay, IconPlayerStop } from "@tabler/icons-react";
import { explained } from "../../api/client";
import { type Command, isOver, useCheckpoints, useCommand } from "../../api/jobs";
import { useCaller } from "../../api/signIn";
import type { Job } from "../../api/types";
import { GuardedButton } from "../../components/GuardedButton";
import { refusalForJob } from "../../lib/access";
import { Downloads } from "./Downloads";
import { Resume } from "./Resume";

const ICON = { size: 16, stroke: 1.7 };

/** Buttons for the commands that the job's state allows; disabled if the user's token forbids them. */
export function Actions({ job }: { job: Job }) {
  const command = useCommand(job.id);
  const checkpoints = useCheckpoints(job.id, job.model !== null);
  const refusal = refusalForJob(useCaller(), job);
  const [cancelling, confirm] = useDisclosure(false);
  const [resuming, resume] = useDisclosure(false);
  const send = (request: Command) =>
    command.mutate(request, {
      onError: (error) => notifications.show({ color: "red", message: explained(error) }),
    });
  return (
    <>
      {job.state === "running" && (
        <GuardedButton
          refusal={refusal}
          variant="default"
          leftSection={<IconPlayerPause {...ICON} />}
          loading={command.isPending}
          onClick={() => send({ name: "pause" })}
        >
          Pause
        </GuardedButton>
      )}
      {job.state === "paused" && (
        <GuardedButton
          refusal={refusal}
          leftSection={<IconPlayerPlay {...ICON} />}
          loading={command.isPending}
          // A job without a budget resumes without a dialog.
          onClick={() => (job.spec.stop?.max_cost_usd ? resume.open() : send({ name: "resume" }))}
        >
          Resume
        </GuardedButton>
      )}
      {!isOver(job) && (
        <GuardedButton
          refusal={refusal}
          variant="default"
          leftSection={<IconPlayerStop {...ICON} />}
          onClick={confirm.open}
        >
          Cancel
        </GuardedButton>
      )}
      {job.model && <Downloads job={job} checkpoints={checkpoints.data ?? []} />}
      {resuming && (
        <Resume
          job={job}
          opened
          onClose={resume.close}
          onResume={(budget) => {
            send({ name: "resume", budget });
            resume.close();
          }}
        />
      )}
      <Modal opened={cancelling} onClose={confirm.close} title={`Cancel ${job.id}?`} centered>
        <Text size="sm">
          Its machines are released and its checkpoints are kept. A cancelled job can't be resumed.
        </Text>
        <Group justify="flex-end" mt="lg">
          <Button variant="default" onClick={confirm.close}>
            Keep running
          </Button>
          <Button
            color="red"
            onClick={() => {
              send({ name: "cancel" });
              confirm.close();
            }}
          >
            Cancel the job
          </Button>
        </Group>
      </Modal>
    </>
  );
}
