output "vpc_id" {
  description = "The network."
  value       = aws_vpc.this.id
}

output "subnets" {
  description = "Subnet by zone."
  value       = { for zone, subnet in aws_subnet.this : zone => subnet.id }
}

output "home_cidr" {
  description = "Address range of the first zone's subnet, which has the control plane and the store."
  value       = aws_subnet.this[var.zones[0]].cidr_block
}

output "security_groups" {
  description = "Security group by role: control, store, worker, managed."
  value       = { for name, group in aws_security_group.this : name => group.id }
}
