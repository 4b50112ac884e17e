output "files" {
  description = "Files of the machine, by path, without secrets."
  value       = { for path, file in local.files : path => file.content }
}

output "user_data" {
  description = "Cloud-config of the machine, without secrets."
  value       = templatefile("${local.infra}/cloud-init/${var.role == "worker" ? "worker" : "server"}.yaml", { files = local.files })
}
