output "path" {
  description = "Name for the controller: regions/<region>/instanceTemplates/<name>."
  value       = "regions/${var.region}/instanceTemplates/${google_compute_region_instance_template.this.name}"
}
