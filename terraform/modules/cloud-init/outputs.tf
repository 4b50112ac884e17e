output "user_data" {
  description = "The cloud-config of the machine; it holds no secret."
  value = templatefile("${local.infra}/cloud-init/${var.role}.yaml", {
    files = merge(local.scripts, local.worker, local.settings, local.configured)
  })
}
