package transport

import (
	"context"
	"fmt"
)

// Receive takes one frame, with its length in front, from a lane of the class. It keeps
// the frame's memory. One goroutine receives the frames of a lane. After an error,
// which has ended the session, there is nothing more to receive.
func (s *Session) Receive(c Class, b []byte) error {
	f, err := parseFrame(b[min(len(b), lengthBytes):])
	if err == nil {
		err = s.receive(c, &f)
	}
	if err != nil {
		s.End(err)
	}
	return err
}

// receive dispatches one frame and may keep its payload.
func (s *Session) receive(c Class, f *frame) error {
	if kindOf(c) != s.cfg.Kind || len(f.payload) > s.ep.cfg.MaxMessageBytes+maxErrorBytes {
		return fmt.Errorf("%w: class %s, %d bytes on the %s session", errProtocol, c, len(f.payload), s.cfg.Kind)
	}
	if c != ClassRequest && f.kind >= framePassCall {
		return fmt.Errorf("%w: kind %d by class %s", errProtocol, f.kind, c)
	}
	if s.ctx.Err() != nil {
		return context.Cause(s.ctx)
	}
	if !s.probe.heard.Load() { // most frames find it set, and write nothing
		s.probe.heard.Store(true)
	}
	switch f.kind {
	case frameMessage:
		return s.receiveMessage(c, f)
	case frameCall, framePassCall, framePassedCall:
		return s.serveCall(c, f)
	case frameReply:
		return s.receiveReply(f)
	case frameCancel:
		s.cancelCall(f.id)
	case frameOpen, framePassOpen, framePassedOpen:
		return s.serveStream(c, f)
	case frameData, frameCredit, frameEnd:
		return s.receiveStream(f)
	case framePing:
		h := pingFrame(framePong, f.id)
		// Full only if the peer reads nothing; then it gets no pong and ends the session.
		_ = s.lanes[c][0].enqueue(&h, pingPadding, false, nil)
	case framePong:
		s.pong(f.id)
	}
	return nil
}

func (s *Session) receiveMessage(c Class, f *frame) error {
	h, ok := s.ep.sends[f.method]
	if !ok {
		// A peer of another version: its messages may be lost, as any message may.
		return nil
	}
	if h.class != c {
		return fmt.Errorf("%w: %s by class %s", errProtocol, f.method, c)
	}
	h.fn(s.cfg.Peer, f.payload)
	return nil
}
