import { Button, type ButtonProps, Tooltip } from "@mantine/core";
import { Link } from "react-router";
import { useOutage } from "../api/reachable";

const OFFLINE = "The API can't be reached.";

/**
 * Button, or link with `to`, that is disabled and says why if the user's token forbids it, or the
 * API can't be reached.
 */
export function GuardedButton({
  refusal: refused,
  to,
  onClick,
  ...look
}: ButtonProps & { refusal: string | null; to?: string; onClick?: () => void }) {
  const outage = useOutage();
  const refusal = outage ? (outage.problem ?? OFFLINE) : refused;
  if (refusal) {
    // Not the attribute `disabled`: such a button gets no focus, so its tooltip could not be read.
    return (
      <Tooltip
        label={refusal}
        position="bottom"
        multiline
        maw={280}
        events={{ hover: true, focus: true, touch: true }}
      >
        <Button {...look} data-disabled aria-disabled onClick={(event) => event.preventDefault()} />
      </Tooltip>
    );
  }
  return to ? (
    <Button component={Link} to={to} {...look} />
  ) : (
    <Button {...look} onClick={onClick} />
  );
}
