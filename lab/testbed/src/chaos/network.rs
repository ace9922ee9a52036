//! Network partitions, for which the switch drops packets from one of its ports to another.

use std::process::Command;

use crate::topology::Testbed;

/// Packet filter (nftables) of the switch, which drops the packets between chosen switch ports.
#[derive(Debug)]
pub struct NetworkFaults<'a> {
    testbed: &'a Testbed,
}

impl<'a> NetworkFaults<'a> {
    /// Creates the nftables table on the switch. Fails when nft (Debian package nftables) or the kernel rejects it.
    pub fn new(testbed: &'a Testbed) -> anyhow::Result<Self> {
        let network_faults = Self { testbed };
        network_faults.run_nft_commands(
            "add table bridge chaos; add chain bridge chaos lost { type filter hook forward priority 0; }",
        )?;
        Ok(network_faults)
    }

    /// Makes the switch drop all packets from `sender_port` to `receiver_port`, and if `is_bidirectional` is true, also
    /// those in the other direction.
    pub fn drop_packets(&self, sender_port: &str, receiver_port: &str, is_bidirectional: bool) -> anyhow::Result<()> {
        let build_drop_rule = |sender_port: &str, receiver_port: &str| {
            format!("add rule bridge chaos lost iifname \"{sender_port}\" oifname \"{receiver_port}\" drop;")
        };
        let reverse_rule = if is_bidirectional { build_drop_rule(receiver_port, sender_port) } else { String::new() };
        self.run_nft_commands(&format!("{}{reverse_rule}", build_drop_rule(sender_port, receiver_port)))
    }

    /// Removes all rules of the packet filter, after which the switch forwards all packets again.
    pub fn stop_dropping_packets(&self) -> anyhow::Result<()> {
        self.run_nft_commands("flush chain bridge chaos lost")
    }

    /// Sets the link of a switch port up or down. Fails when the port does not exist.
    pub fn set_port_link(&self, port: &str, is_up: bool) -> anyhow::Result<()> {
        let mut command = Command::new("ip");
        command.args(["link", "set", "dev", port, if is_up { "up" } else { "down" }]);
        self.testbed.run_command(self.testbed.switch(), command).map(drop)
    }

    fn run_nft_commands(&self, commands: &str) -> anyhow::Result<()> {
        let mut command = Command::new("nft");
        command.arg(commands);
        self.testbed.run_command(self.testbed.switch(), command).map(drop)
    }
}
