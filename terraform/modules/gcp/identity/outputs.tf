output "accounts" {
  description = "Email address of each role's service account: control, store, worker."
  value       = { for name, account in google_service_account.this : name => account.email }
}

output "secrets" {
  description = "Path of each secret: api-token, job-secrets, ray-token, servers."
  value       = { for name, secret in google_secret_manager_secret.this : name => "projects/${var.project}/secrets/${secret.secret_id}" }
}
