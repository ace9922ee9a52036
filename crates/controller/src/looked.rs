//! What a service's tables are made of, apart from loads, as it was when somebody last looked. Servers are looked at in pieces: reports
//! wait meanwhile, and a service may have ten thousand.

use std::collections::BTreeMap;
use std::ops::Range;

use coreward_model::ServerId;

/// Ids of a piece. A look at so many servers takes about a millisecond; what changes by itself in a service of ten thousand is found
/// after five report intervals.
const PIECE: u64 = 2048;

/// A piece of a service's servers, by their ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Piece(u64);

impl Piece {
    fn of(id: ServerId) -> Self {
        Self(u64::from(id.get()) / PIECE)
    }

    fn ids(self) -> Range<u64> {
        self.0 * PIECE..(self.0 + 1) * PIECE
    }

    /// Those of `members` that are in the piece.
    pub fn members<T>(self, members: &BTreeMap<ServerId, T>) -> impl Iterator<Item = ServerId> {
        let ids = self.ids();
        let first = ServerId::try_from(ids.start).expect("a piece begins with the id of a server");
        members.range(first..).map(|(id, _)| *id).take_while(move |id| ids.contains(&u64::from(id.get())))
    }
}

/// What was found, as one number for each piece and one for the service.
#[derive(Debug, Default)]
pub struct Looked {
    service: Option<u64>,
    pieces: BTreeMap<Piece, u64>,
    last: Option<Piece>,
}

impl Looked {
    /// The piece that comes after the one that was looked at last, or all of them: where `all`, and the first time.
    pub fn next<T>(&mut self, members: &BTreeMap<ServerId, T>, all: bool) -> Vec<Piece> {
        let from = |first: u64| {
            let first = ServerId::try_from(first).ok()?;
            members.range(first..).next().map(|(id, _)| Piece::of(*id))
        };
        if all || self.service.is_none() {
            return std::iter::successors(from(0), |piece| from(piece.ids().end)).collect();
        }
        self.last = self.last.and_then(|last| from(last.ids().end)).or_else(|| from(0));
        self.last.into_iter().collect()
    }

    /// Takes note of what is found now; whether it is something else.
    pub fn finds(&mut self, service: u64, pieces: &[(Piece, u64)]) -> bool {
        let mut is_new = self.service.replace(service) != Some(service);
        for (piece, found) in pieces {
            is_new |= self.pieces.insert(*piece, *found) != Some(*found);
        }
        is_new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn members(ids: &[u64]) -> BTreeMap<ServerId, ()> {
        ids.iter().map(|id| ((*id).try_into().unwrap(), ())).collect()
    }

    #[test]
    fn pieces_come_in_turn_after_all_of_them() {
        let members = members(&[3, 2047, 9_000, 16_383]);
        let mut looked = Looked::default();
        let all = looked.next(&members, false);
        assert_eq!(all, [Piece(0), Piece(4), Piece(7)]);
        let of = |piece: Piece| piece.members(&members).map(|id| id.get()).collect::<Vec<_>>();
        assert_eq!([of(all[0]), of(all[1]), of(all[2])], [vec![3, 2047], vec![9_000], vec![16_383]]);
        assert!(looked.finds(1, &[(Piece(0), 5), (Piece(4), 6), (Piece(7), 7)]));
        let mut next = || looked.next(&members, false);
        assert_eq!([next(), next(), next(), next()], [[Piece(0)], [Piece(4)], [Piece(7)], [Piece(0)]]);
        assert_eq!(looked.next(&members, true), all);
        assert!(!looked.finds(1, &[(Piece(4), 6)]));
        assert!(looked.finds(1, &[(Piece(4), 8)]));
        assert!(looked.finds(2, &[(Piece(4), 8)]));
    }

    #[test]
    fn a_service_without_servers_has_no_piece() {
        let mut looked = Looked::default();
        assert_eq!(looked.next(&members(&[]), true), []);
        assert!(looked.finds(1, &[]));
        assert_eq!(looked.next(&members(&[]), false), []);
    }
}
