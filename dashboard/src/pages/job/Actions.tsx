import { Button, Group, Modal, Text } from "@mantine/core";
import { useDisclosure } from "@mantine/hooks";
import { notifications } from "@mantine/notifications";
import { IconDownload, IconPlayerPause, IconPlayerPlay, IconPlayerStop } from "@tabler/icons-react";
import { type Command, isOver, useCommand } from "../../api/jobs";
import type { Job } from "../../api/types";
import { Resume } from "./Resume";

const ICON = { size: 16, stroke: 1.7 };

/** What may be done with the job in its state. */
export function Actions({ job }: { job: Job }) {
  const command = useCommand(job.id);
  const [asking, ask] = useDisclosure(false);
  const [resuming, resume] = useDisclosure(false);
  const send = (wanted: Command) =>
    command.mutate(wanted, {
      onError: (error) => notifications.show({ color: "red", message: error.message }),
    });
  return (
    <>
      {job.state === "running" && (
        <Button
          variant="default"
          leftSection={<IconPlayerPause {...ICON} />}
          loading={command.isPending}
          onClick={() => send({ name: "pause" })}
        >
          Pause
        </Button>
      )}
      {job.state === "paused" && (
        <Button
          leftSection={<IconPlayerPlay {...ICON} />}
          loading={command.isPending}
          // without a budget there is nothing to ask
          onClick={() => (job.spec.stop?.max_cost_usd ? resume.open() : send({ name: "resume" }))}
        >
          Resume
        </Button>
      )}
      {!isOver(job) && (
        <Button variant="default" leftSection={<IconPlayerStop {...ICON} />} onClick={ask.open}>
          Cancel
        </Button>
      )}
      {job.model && (
        <Button
          component="a"
          href={`/api/v1/jobs/${job.id}/model`}
          download
          leftSection={<IconDownload {...ICON} />}
        >
          Download model
        </Button>
      )}
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
      <Modal opened={asking} onClose={ask.close} title={`Cancel ${job.id}?`} centered>
        <Text size="sm">
          Its machines are given back. What it has learned stays in its checkpoints, and it can't be
          resumed.
        </Text>
        <Group justify="flex-end" mt="lg">
          <Button variant="default" onClick={ask.close}>
            Keep it
          </Button>
          <Button
            color="red"
            onClick={() => {
              send({ name: "cancel" });
              ask.close();
            }}
          >
            Cancel the job
          </Button>
        </Group>
      </Modal>
    </>
  );
}
