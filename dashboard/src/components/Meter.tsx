import classes from "./Meter.module.css";

/** Progress bar with a figure beside it. */
export function Meter({
  fraction,
  text,
  label,
  done = false,
}: {
  fraction: number;
  text: string;
  label: string;
  done?: boolean;
}) {
  const percent = Math.round(100 * Math.min(1, Math.max(0, fraction)));
  return (
    <span className={classes.meter}>
      <span
        className={classes.track}
        role="progressbar"
        aria-label={label}
        aria-valuenow={percent}
        aria-valuemin={0}
        aria-valuemax={100}
      >
        <span className={classes.fill} data-done={done} style={{ width: `${percent}%` }} />
      </span>
      <span className={classes.text}>{text}</span>
    </span>
  );
}
