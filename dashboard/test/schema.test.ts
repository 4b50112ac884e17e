import { expect, test } from "vitest";
import { fieldsAt, helpFor, placeAt, type Schema, valuesAt } from "../src/lib/schema";

const SCHEMA: Schema = {
  required: ["name"],
  properties: {
    name: { type: "string", description: "Name of the job" },
    epochs: { type: "integer", minimum: 1, maximum: 10, default: 3 },
    push_every: { anyOf: [{ const: "subtask" }, { type: "integer", minimum: 1 }] },
    update: { oneOf: [{ $ref: "#/$defs/Vc" }, { $ref: "#/$defs/Fed" }] },
  },
  $defs: {
    Vc: { properties: { rule: { const: "vc-asgd" }, codec: { enum: ["float32", "bfloat16"] } } },
    Fed: { properties: { rule: { const: "fedasync" }, beta: { type: "number" } } },
  },
};

function at(text: string) {
  return placeAt(text.replace("|", ""), text.indexOf("|"));
}

test.each([
  ["na|", { path: [], key: null, typed: "na" }],
  ["name: x\nepochs: 1|", { path: [], key: "epochs", typed: "1" }],
  ["update:\n  rule: v|", { path: ["update"], key: "rule", typed: "v" }],
  ["update:\n  rule: x\n  co|\nname: y", { path: ["update"], key: null, typed: "co" }],
  ["update: {rule: x, co|}", { path: ["update"], key: null, typed: "co" }],
  ["update: {rule: |}", { path: ["update"], key: "rule", typed: "" }],
  ["a:\n  b:\n    c: 1\n  d|", { path: ["a"], key: null, typed: "d" }],
  ["a:\n  b:\n    c: 1\nd|", { path: [], key: null, typed: "d" }],
])("the place in %j", (text, place) => {
  expect(at(text)).toEqual(place);
});

test("fieldsAt merges all alternatives and adds help", () => {
  expect(fieldsAt(SCHEMA, ["update"]).map((each) => each.name)).toEqual(["rule", "codec", "beta"]);
  expect(fieldsAt(SCHEMA, [])[0]).toEqual({
    name: "name",
    required: true,
    help: "Name of the job; string",
  });
  expect(helpFor(SCHEMA, ["epochs"])).toBe("integer from 1 to 10; default 3");
  expect(helpFor(SCHEMA, ["push_every"])).toBe("subtask or integer from 1");
  expect(helpFor(SCHEMA, ["nothing"])).toBeNull();
});

test("valuesAt lists the values of enumerations", () => {
  expect(valuesAt(SCHEMA, ["update", "rule"])).toEqual(["vc-asgd", "fedasync"]);
  expect(valuesAt(SCHEMA, ["update", "codec"])).toEqual(["float32", "bfloat16"]);
  expect(valuesAt(SCHEMA, ["name"])).toEqual([]);
});
