import { unzipSync } from "fflate";
import { expect, test } from "vitest";
import { lineOf } from "../src/lib/lines";
import { filter, packageOf } from "../src/lib/packing";

function file(path: string, text: string): File {
  const created = new File([text], path.split("/").at(-1) ?? path);
  Object.defineProperty(created, "webkitRelativePath", { value: path });
  // jsdom's files don't support this method.
  created.arrayBuffer = async () => new TextEncoder().encode(text).buffer;
  return created;
}

test("a package contains a folder's files without its name and ignored files", async () => {
  const folder = [file("job/train.py", "x"), file("job/.git/HEAD", "y"), file("job/lib/a.py", "z")];

  const { name, files, zip } = await packageOf(folder);

  expect([name, files]).toEqual(["job", 2]);
  expect(Object.keys(unzipSync(zip))).toEqual(["lib/a.py", "train.py"]);
  const again = await packageOf([...folder].reverse());
  expect(again.zip).toEqual(zip);
});

test("a package leaves out files that .vcasgdignore lists", async () => {
  const { zip } = await packageOf([
    file("job/.vcasgdignore", "# data\n\n  /data  \n*.bin\n!keep.bin\n!.git\n"),
    file("job/train.py", "x"),
    file("job/data/raw.csv", "x"),
    file("job/lib/data/kept.csv", "x"),
    file("job/lib/big.bin", "x"),
    file("job/keep.bin", "x"),
    file("job/.git/HEAD", "x"),
  ]);

  expect(Object.keys(unzipSync(zip))).toEqual([
    ".vcasgdignore",
    "keep.bin",
    "lib/data/kept.csv",
    "train.py",
  ]);
});

test("a package never contains the home of a stack", async () => {
  const { zip } = await packageOf([
    file("job/.vcasgdignore", "!.vcasgd"),
    file("job/.vcasgd/stack.lock", ""),
    file("job/.vcasgd/token", "secret"),
    file("job/.vcasgd/ledger/server.conf", "secret"),
    file("job/train.py", "x"),
  ]);

  expect(Object.keys(unzipSync(zip))).toEqual([".vcasgdignore", "train.py"]);
});

test("the name of the chosen folder is not matched", async () => {
  const { files } = await packageOf([file("venv/train.py", "x")]);
  expect(files).toBe(1);
});

// The same cases as in tests/unit/test_package.py.
test.each([
  ["", "train.py", true],
  ["", "a/__pycache__/train.pyc", false],
  ["", "node_modules/x/index.js", false],
  ["", "job.egg-info/PKG-INFO", false],
  ["", "venvs/notes.txt", true],
  ["data/", "data/raw/big.bin", false],
  ["data/raw/*", "data/raw/big.bin", false],
  ["**/big.bin", "data/raw/big.bin", false],
  ["b?g.[a-c]in", "data/raw/big.bin", false],
  ["raw/", "data/raw/big.bin", false],
  ["/big.bin", "data/raw/big.bin", true],
  ["data/*.bin", "data/raw/big.bin", true],
  ["*.bin\n!big.bin", "data/raw/big.bin", true],
  ["big.bin/", "data/raw/big.bin", true],
  ["\\*.bin", "data/raw/big.bin", true],
  ["BIG.bin", "data/raw/big.bin", true],
])("with the patterns %j, a package includes %s: %s", (patterns, path, included) => {
  expect(filter(patterns)(path)).toBe(included);
});

test.each([
  ["epochs", 1],
  ["update.alpha", 4],
  ["update.missing", 2],
  ["", 0],
])("the field %s is on line %d", (path, line) => {
  expect(lineOf("name: x\nepochs: 3\nupdate:\n  rule: vc-asgd\n  alpha: 2\n", path)).toBe(line);
});
