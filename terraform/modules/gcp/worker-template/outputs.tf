output "path" {
  description = "Name for the controller: regions/<region>/instanceTemplates/<name>."
  value       = "regions/${var.region}/instanceTemplates/${google_compute_region_instance_template.this.name}"
}

output "secure_boot" {
  description = "True if machines load only signed drivers."
  value       = google_compute_region_instance_template.this.shielded_instance_config[0].enable_secure_boot
}
