//! Tests that load BPF programs as root, in one executable.

mod cpu_load;
mod dispatch_books;
mod dispatch_decisions;
mod lb_broadcast;
mod lb_capture;
mod lb_connections;
mod lb_connections_flood;
mod lb_connections_life;
mod lb_connections_reuse;
mod lb_counters;
mod lb_decisions;
mod lb_flows;
mod lb_forwarding;
mod lb_icmp;
mod lb_life;
mod lb_malformed;
mod lb_modes;
mod lb_stamping;
mod lb_tables;
mod lb_udp;
mod pins;
mod server_kernel_tcp;
mod server_modes;
mod server_test_run;
mod support;
mod verifier_costs;
