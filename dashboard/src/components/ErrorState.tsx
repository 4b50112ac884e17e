import { Button, Text } from "@mantine/core";
import { IconPlugConnectedX } from "@tabler/icons-react";
import { ApiError } from "../api/client";
import classes from "./State.module.css";

/** Message and remedy of an error, with a button to retry. */
export function ErrorState({ error, onRetry }: { error: unknown; onRetry?: () => void }) {
  const message = error instanceof Error ? error.message : String(error);
  const remedy = error instanceof ApiError ? error.remedy : null;
  return (
    <div className={classes.state} role="alert">
      <IconPlugConnectedX size={28} stroke={1.5} className={classes.bad} aria-hidden />
      <Text fw={600}>{message}</Text>
      {remedy && (
        <Text size="sm" c="dimmed">
          {remedy}
        </Text>
      )}
      {onRetry && (
        <Button variant="default" size="xs" mt="xs" onClick={onRetry}>
          Try again
        </Button>
      )}
    </div>
  );
}
