import { expect, test } from "vitest";
import type { Job } from "../src/api/types";
import { addressOf, differences, finals, jobsIn, MAX_COMPARED } from "../src/lib/comparison";
import { aJob } from "./factories";

function withSpec(spec: object): Job {
  return aJob({ spec: spec as Job["spec"] });
}

test("an address names each job once, up to the limit", () => {
  const jobs = ["a-1", "b-2"];
  const parse = (address: string) => jobsIn(new URLSearchParams(address.split("?")[1]));

  expect(parse(addressOf(jobs))).toEqual(jobs);
  expect(parse("/compare?jobs=a-1,,a-1,b-2")).toEqual(jobs);
  expect(parse("/compare")).toEqual([]);
  const many = Array.from({ length: 20 }, (_, index) => `job-${index}`);
  expect(parse(addressOf(many))).toEqual(many.slice(0, MAX_COMPARED));
});

test("only settings that differ are listed, by their full names and without variables", () => {
  const common = { name: "a", task: "train:A", labels: [], stop: { accuracy: null } };
  const rows = differences([
    withSpec({ ...common, args: { lr: 0.1, depth: 3 }, env: { KEY: "1" } }),
    withSpec({ ...common, name: "b", args: { lr: 0.2, depth: 3 }, stop: { accuracy: 0.9 } }),
  ]);

  expect(rows).toEqual([
    { name: "args.lr", values: ["0.1", "0.2"] },
    { name: "stop.accuracy", values: [null, "0.9"] },
  ]);
});

test("final metrics are those of the last evaluations", () => {
  const evaluation = (metrics: Record<string, number>) =>
    ({ metrics }) as Job["evaluations"][number];
  const rows = finals([
    aJob({
      evaluations: [
        evaluation({ accuracy: 0.5 }),
        evaluation({ accuracy: 0.7, count: 360, loss: 1 }),
      ],
    }),
    aJob({ evaluations: [evaluation({ accuracy: 0.6 })] }),
    aJob({ evaluations: [] }),
  ]);

  expect(rows).toEqual([
    { name: "accuracy", values: [0.7, 0.6, null] },
    { name: "loss", values: [1, null, null] },
  ]);
});
