output "id" {
  description = "The launch template."
  value       = aws_launch_template.this.id
}
