output "files" {
  description = "What the machine will have, by path; without secrets."
  value       = { for path, file in local.files : path => file.content }
}

output "user_data" {
  description = "The cloud-config of the machine; it holds no secret."
  value       = templatefile("${local.infra}/cloud-init/${var.role}.yaml", { files = local.files })
}
