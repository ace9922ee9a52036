//! TCP transport for requests to the testbed's paced server.

use zerocopy::IntoBytes as _;

use super::AnsweringWorker;
use super::connections::{ConnectionProtocol, ConnectionReply, MalformedResponse};
use crate::paced_protocol::{PacedMessageBuffer, PacedRequest, PacedResponse};
use crate::workload::RequestParameters;

/// Protocol of [`crate::paced_protocol`], in which each request contains its service time.
#[derive(Debug, Clone, Copy)]
pub struct PacedProtocol;

impl ConnectionProtocol for PacedProtocol {
    type ReplyReader = PacedMessageBuffer;
    const ALLOWS_PIPELINING: bool = true;

    fn write_request(&self, parameters: &RequestParameters, id: u32, output: &mut Vec<u8>) {
        let request = PacedRequest { service_us: parameters.service_ns.div_ceil(1_000).into(), id: id.into() };
        output.extend_from_slice(request.as_bytes());
    }

    fn read_replies(
        reader: &mut PacedMessageBuffer,
        bytes: &[u8],
        on_reply: &mut dyn FnMut(ConnectionReply),
    ) -> Result<(), MalformedResponse> {
        reader.for_each_message(bytes, |response: PacedResponse| {
            let worker = Some(AnsweringWorker { server: response.server_number, worker: response.core_number.into() });
            on_reply(ConnectionReply { request_id: Some(response.id.get()), worker, ..ConnectionReply::default() });
        });
        Ok(())
    }
}
