export const TEMPLATE = `name: my-model
task: train:MyTask        # module:Class in the working directory, or a script
epochs: 10
workers: {min: 1, max: 4}
checkpoint: {every: 5m, keep: 3}
`;
