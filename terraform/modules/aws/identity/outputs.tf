output "profiles" {
  description = "Instance profile by role: control, store, worker."
  value       = { for name, profile in aws_iam_instance_profile.this : name => profile.name }

  # A machine that starts before its permissions exist would fail.
  depends_on = [aws_iam_role_policy.this]
}

output "secrets" {
  description = "Name of each secret: api-token, job-secrets, ray-token, servers."
  value       = { for name, secret in aws_secretsmanager_secret.this : name => secret.name }
}

output "roles" {
  description = "Name and ARN of each role: control, store, worker."
  value       = { for name, role in aws_iam_role.this : name => { name = role.name, arn = role.arn } }
}
