//! Network partitions, for which the switch drops packets from one of its ports to another.

use std::process::Command;

use crate::topology::Testbed;

/// Packet filter rules with which the switch drops packets.
#[derive(Debug)]
pub struct NetworkFaults<'a> {
    testbed: &'a Testbed,
}

impl<'a> NetworkFaults<'a> {
    /// Creates the packet filter's tables. Fails when nft (Debian package nftables) or the kernel rejects them.
    pub fn new(testbed: &'a Testbed) -> anyhow::Result<Self> {
        let network_faults = Self { testbed };
        network_faults
            .run_nft("add table bridge chaos; add chain bridge chaos lost { type filter hook forward priority 0; }")?;
        Ok(network_faults)
    }

    /// Drops all packets from port `sender_port` to port `receiver_port`. If `is_bidirectional`, it also drops those in
    /// the other direction.
    pub fn drop_packets(&self, sender_port: &str, receiver_port: &str, is_bidirectional: bool) -> anyhow::Result<()> {
        let drop_rule = |sender_port: &str, receiver_port: &str| {
            format!("add rule bridge chaos lost iifname \"{sender_port}\" oifname \"{receiver_port}\" drop;")
        };
        let reverse_rule = if is_bidirectional { drop_rule(receiver_port, sender_port) } else { String::new() };
        self.run_nft(&format!("{}{reverse_rule}", drop_rule(sender_port, receiver_port)))
    }

    /// Removes the rules, so that all packets pass again.
    pub fn stop_dropping_packets(&self) -> anyhow::Result<()> {
        self.run_nft("flush chain bridge chaos lost")
    }

    /// Sets the link of a port up or down. Fails when the port does not exist.
    pub fn set_port_link(&self, port: &str, is_up: bool) -> anyhow::Result<()> {
        let mut command = Command::new("ip");
        command.args(["link", "set", "dev", port, if is_up { "up" } else { "down" }]);
        self.testbed.run_command(self.testbed.switch(), command).map(drop)
    }

    fn run_nft(&self, commands: &str) -> anyhow::Result<()> {
        let mut command = Command::new("nft");
        command.arg(commands);
        self.testbed.run_command(self.testbed.switch(), command).map(drop)
    }
}
