import { Button, FileButton, Group } from "@mantine/core";
import { useDebouncedValue } from "@mantine/hooks";
import { IconFileZip, IconFolder } from "@tabler/icons-react";
import { useRef, useState } from "react";
import { useNavigate } from "react-router";
import { explained } from "../api/client";
import { useCaller } from "../api/signIn";
import { usePlan, useSpecSchema, useSubmit, useValidation } from "../api/submitting";
import type { Mistake } from "../api/types";
import { GuardedButton } from "../components/GuardedButton";
import { Notice } from "../components/Notice";
import { PageHead } from "../components/PageHead";
import { Panel } from "../components/Panel";
import { refusal } from "../lib/access";
import { bytes } from "../lib/format";
import { type Package, packageOf } from "../lib/packing";
import classes from "./SubmitPage.module.css";
import { Editor } from "./submit/Editor";
import { PlanPanel } from "./submit/PlanPanel";
import { TEMPLATE } from "./submit/template";

const TYPING_MS = 350;
const NONE: Mistake[] = [];

/** Form for a new job: YAML, code, plan, and submission. */
export default function SubmitPage() {
  const [text, setText] = useState(TEMPLATE);
  const [code, setCode] = useState<Package | null>(null);
  const [settled] = useDebouncedValue(text, TYPING_MS);
  const checked = useValidation(settled);
  const mistakes = checked.data?.errors ?? NONE;
  const warnings = checked.data?.warnings ?? NONE;
  // While the user types, the last validation does not match the text.
  const spec = settled === text && !checked.isPlaceholderData ? checked.data?.spec : null;
  const schema = useSpecSchema().data;
  const plan = usePlan();
  const submit = useSubmit();
  const navigate = useNavigate();
  const refused = refusal(useCaller(), "submit");
  const mistaken = spec ? null : "The job file must be valid first.";
  const missing = !code
    ? "Choose the working directory first."
    : plan.isSuccess || plan.isError
      ? null
      : "Look at the plan first.";
  // One key per page, so that pressing the button twice submits one job.
  const key = useRef(crypto.getRandomValues(new Uint32Array(4)).join("-"));
  const change = (next: string) => {
    setText(next);
    plan.reset();
    submit.reset();
  };
  const send = () => {
    if (!code || !spec) return;
    submit.mutate(
      { spec, zip: code.zip, key: key.current },
      { onSuccess: (job) => navigate(`/jobs/${job.id}`) },
    );
  };
  return (
    <div className="stack">
      <PageHead title="Submit a job" />
      {refused && <Notice tone="warn" title={refused} />}
      <div className={classes.columns}>
        <Panel title="job.yaml" note={<Verdict checked={checked} />} flush>
          <Editor
            initial={TEMPLATE}
            mistakes={mistakes}
            warnings={warnings}
            schema={schema}
            onChange={change}
          />
          <Mistakes mistakes={mistakes} tone="bad" />
          <Mistakes mistakes={warnings} tone="warn" />
        </Panel>
        <div className="stack">
          <Code code={code} onCode={setCode} />
          <PlanPanel
            plan={plan}
            refusal={mistaken}
            onPlan={(known) => spec && plan.mutate({ spec, ...known })}
            action={
              <GuardedButton
                refusal={refused ?? mistaken ?? missing}
                fullWidth
                loading={submit.isPending}
                onClick={send}
              >
                Submit the job
              </GuardedButton>
            }
          />
          {submit.isError && <Notice tone="bad" title={explained(submit.error)} />}
        </div>
      </div>
    </div>
  );
}

function plural(count: number, noun: string): string {
  return `${count} ${noun}${count === 1 ? "" : "s"}`;
}

function Verdict({ checked }: { checked: ReturnType<typeof useValidation> }) {
  if (checked.isError) return <span className={classes.bad}>validation unavailable</span>;
  if (!checked.data) return <span>checking</span>;
  const { valid, errors, warnings } = checked.data;
  if (!valid) return <span className={classes.bad}>{plural(errors.length, "error")}</span>;
  if (warnings.length > 0) {
    return <span className={classes.warn}>valid, {plural(warnings.length, "warning")}</span>;
  }
  return <span className={classes.good}>valid</span>;
}

function Mistakes({ mistakes, tone }: { mistakes: Mistake[]; tone: "bad" | "warn" }) {
  if (mistakes.length === 0) return null;
  return (
    <ul className={`${classes.mistakes} ${classes[tone]}`} aria-live="polite">
      {mistakes.map((each) => (
        <li key={`${each.path} ${each.message}`}>
          {each.path && <b>{each.path}: </b>}
          {each.message}
          {each.remedy && <span className={classes.remedy}>{each.remedy}</span>}
        </li>
      ))}
    </ul>
  );
}

function Code({ code, onCode }: { code: Package | null; onCode: (code: Package) => void }) {
  const [problem, setProblem] = useState<string | null>(null);
  const take = async (files: File[]) => {
    try {
      onCode(await packageOf(files));
      setProblem(null);
    } catch (error) {
      setProblem(explained(error));
    }
  };
  return (
    <Panel
      title="Working directory"
      note={code ? `${code.name}, ${bytes(code.zip.length)}` : "the code that workers run"}
    >
      <Group gap="xs">
        <FileButton
          multiple
          onChange={take}
          inputProps={{ webkitdirectory: "" } as React.ComponentProps<"input">}
        >
          {(props) => (
            <Button
              {...props}
              variant="default"
              leftSection={<IconFolder size={16} stroke={1.7} />}
            >
              Choose a folder
            </Button>
          )}
        </FileButton>
        <FileButton
          accept=".zip,application/zip"
          onChange={(file) => file && take([file])}
          inputProps={{ "aria-label": "Zip file" }}
        >
          {(props) => (
            <Button
              {...props}
              variant="default"
              leftSection={<IconFileZip size={16} stroke={1.7} />}
            >
              Choose a zip
            </Button>
          )}
        </FileButton>
      </Group>
      {problem && <span className={classes.bad}>{problem}</span>}
    </Panel>
  );
}
