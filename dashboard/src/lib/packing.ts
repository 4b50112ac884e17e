import { zipSync } from "fflate";
import ignore from "ignore";

/** Patterns that are never part of a package; the same as in `vcasgd/task/package.py`. */
const IGNORED = [
  ".git",
  ".venv",
  "venv",
  "node_modules",
  "__pycache__",
  "*.pyc",
  "*.egg-info",
  ".DS_Store",
  ".mypy_cache",
  ".pytest_cache",
  ".ruff_cache",
  ".ipynb_checkpoints",
  ".ssh",
  ".aws",
  ".gnupg",
  ".kube",
  ".netrc",
];
const IGNORE_FILE = ".vcasgdignore";
/** A folder with this file is the home of a stack, with its secrets. */
const HOME_FILE = "stack.lock";
/** Date of every file, so that equal content gives an equal digest. */
const DATE = new Date(1980, 0, 1, 0, 0, 0);

export type Package = { name: string; files: number; zip: Uint8Array };

type Entry = { path: string; data: Uint8Array };

/** Returns a chosen zip as it is, or the files of a chosen folder as a zip. */
export async function packageOf(files: File[]): Promise<Package> {
  const [first] = files;
  if (!first) throw new Error("no file was chosen");
  if (files.length === 1 && !first.webkitRelativePath && first.name.endsWith(".zip")) {
    return { name: first.name, files: 1, zip: await content(first) };
  }
  const ignoreFile = files.find((file) => pathIn(file) === IGNORE_FILE);
  const patterns = ignoreFile ? new TextDecoder().decode(await content(ignoreFile)) : "";
  const included = filter(patterns);
  const homes = files
    .map(pathIn)
    .filter((path) => `/${path}`.endsWith(`/${HOME_FILE}`))
    .map((path) => path.slice(0, -HOME_FILE.length));
  const entries = await Promise.all(
    files
      .filter((file) => included(pathIn(file)))
      .filter((file) => !homes.some((home) => pathIn(file).startsWith(home)))
      .map(async (file) => ({ path: pathIn(file), data: await content(file) })),
  );
  if (entries.length === 0) throw new Error("the folder contains no files");
  const folder = first.webkitRelativePath.split("/")[0];
  return { name: folder || `${entries.length} files`, files: entries.length, zip: zipOf(entries) };
}

/**
 * Returns a test for the paths of a package. `patterns` is the content of an ignore file, with the
 * semantics of gitignore.
 */
export function filter(patterns: string): (path: string) => boolean {
  const lines = patterns.split(/\r?\n/).map((line) => line.trim());
  // The last match decides, so no pattern of the file can re-include IGNORED.
  return ignore({ ignorecase: false })
    .add([...lines, ...IGNORED])
    .createFilter();
}

function zipOf(entries: Entry[]): Uint8Array {
  const files = entries
    .sort((a, b) => (a.path < b.path ? -1 : 1))
    .map(({ path, data }) => [path, [data, { mtime: DATE }]] as const);
  return zipSync(Object.fromEntries(files) as Parameters<typeof zipSync>[0]);
}

/** Returns a file's path in the chosen folder. */
function pathIn(file: File): string {
  const path = file.webkitRelativePath || file.name;
  return path.includes("/") ? path.slice(path.indexOf("/") + 1) : path;
}

async function content(file: File): Promise<Uint8Array> {
  return new Uint8Array(await file.arrayBuffer());
}
