//! End-to-end tests that may run in parallel, in one executable.

mod adopting;
mod announce;
mod certificates;
mod confined;
mod connection_table;
mod containers;
mod controllers_tls;
mod dispatch;
mod doctor;
mod drain;
mod expired_tables;
mod health;
mod health_connections;
mod ipv6;
mod key_rotation;
mod key_value;
mod lb_timestamps;
mod load_balancers;
mod load_connections;
mod lost_frames;
mod lost_store;
mod metrics;
mod mounted_disk;
mod mptcp;
mod no_timestamps;
mod orchestrate;
mod orchestrate_af_xdp;
mod paced_traffic;
mod packages;
mod path_mtu;
mod rack_controllers;
mod resets;
mod robustness;
mod routed;
mod routed_mtu;
mod topology;
mod tutorial;
mod udp;
mod units;
mod upgrades;
mod vlans;
mod without_etcd;

#[path = "../support/mod.rs"]
mod support;
